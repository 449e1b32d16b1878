"""body="inductor": chunk programs compiled by Inductor, once for each distinct one and not for each chunk."""

from __future__ import annotations

import copy
import shutil
from typing import Any

import pytest
import torch
from e2e_check import assert_close_grads, step
from e2e_models import CHUNK, LOSS_CHUNK, build, padded, plain

import streambp_fx
from streambp_fx.passes.s5_lower import lower

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None, reason="Inductor needs a C++ compiler"
)


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    real = lower._compiled_by_inductor

    def compiled(module: Any, fakes: Any) -> Any:
        found.append(module)
        return real(module, fakes)

    monkeypatch.setattr(lower, "_compiled_by_inductor", compiled)
    return found


def test_inductor_compiles_once_for_all_chunks(compilations: list[Any]) -> None:
    """Two layers, four lengths: forward, states and joint, with and without a prefix, and the head."""
    eager = build("llama", dtype=torch.float32)
    model = copy.deepcopy(eager)
    streambp_fx.transform(model, chunk=CHUNK, loss_chunk=LOSS_CHUNK, body="inductor")
    counts = []
    for batch in (plain(2, 67), plain(2, 80), plain(2, 33), plain(2, 129)):
        _, want = step(eager, batch)
        _, got = step(model, batch)
        assert_close_grads(got, want, 1e-5)
        counts.append(len(compilations))
    assert counts == [6] * 4, counts


@pytest.mark.slow
def test_inductor_with_a_mask_and_dropout(compilations: list[Any]) -> None:
    """The same chunk is drawn twice, forwards and recomputed, with the same mask."""
    model = build("gpt2", dtype=torch.float32, resid_pdrop=0.2, n_layer=1)
    streamed = {}
    for body in ("eager", "inductor"):
        own = copy.deepcopy(model)
        streambp_fx.transform(own, chunk=CHUNK, loss_chunk=LOSS_CHUNK, body=body)
        torch.manual_seed(3)
        streamed[body] = step(own, padded(37, "right"))
    assert_close_grads(streamed["inductor"][1], streamed["eager"][1], 1e-5)
    assert compilations
