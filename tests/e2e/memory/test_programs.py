"""One trace of a program serves all chunk lengths, sequence lengths and batch sizes."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from e2e_check import assert_close_grads, grads, in_double
from e2e_models import VOCAB, build, plain, sample

import streambp_fx
from streambp_fx.backend import _compiled
from streambp_fx.runtime.segments.segment_runner import SegmentRunner


@pytest.mark.parametrize("family", sample(["gpt_neox", "opt", "gemma2"], "gpt_neox"))
def test_no_program_is_traced_twice(family: str) -> None:
    model = build(family)
    streambp_fx.transform(model, chunk=16, loss_chunk=8)
    for batch, tokens in ((2, 67), (2, 97), (3, 51), (4, 80)):
        model(**plain(batch, tokens)).loss.backward()
    own = {id(p) for p in model.parameters()}
    graphs = [c for c in _compiled if any(id(r()) in own for r in c.parameters)]
    runners = [r for c in graphs for v in c.versions for r in getattr(v, "runners", [])]
    counts = {len(t) for r in runners if isinstance(r, SegmentRunner) for t in r.programs.traces.values()}
    assert counts == {1}, counts


def test_weights_of_classes_are_no_rows() -> None:
    """As many classes as tokens, too."""
    with in_double(functools.partial(build, "llama")):
        eager = build("llama")
        model = copy.deepcopy(eager)
        weight = torch.rand(VOCAB, dtype=torch.float64) + 0.5

        def loss(of: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
            logits = of(ids, use_cache=False).logits[:, :-1].reshape(-1, VOCAB)
            rows = F.cross_entropy(logits, ids[:, 1:].reshape(-1), weight=weight, reduction="none")
            return (rows * torch.arange(len(rows))).mean()

        call = torch.compile(
            lambda ids: loss(model, ids), backend="streambp", options={"chunk": 16, "loss_chunk": 8}
        )
        for tokens in (67, VOCAB):
            ids = plain(2, tokens)["input_ids"]
            eager.zero_grad()
            model.zero_grad()
            loss(eager, ids).backward()
            call(ids).backward()
            assert_close_grads(grads(model), grads(eager), 1e-9)
