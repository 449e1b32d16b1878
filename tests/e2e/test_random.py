"""Random models against eager: what the compiler makes of any combination must be exact.

More of them: STREAMBP_RANDOM=500 make test ARGS="-k test_random_models"
"""

from __future__ import annotations

import copy
import math
import os
import sys

import pytest
import torch
from e2e_random import VOCAB, RandomModel

import streambp_fx

COUNT = int(os.environ.get("STREAMBP_RANDOM", "5"))


@pytest.mark.parametrize("seed", range(COUNT))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_random_models(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    eager = RandomModel(seed)
    model = copy.deepcopy(eager)
    monkeypatch.setattr(sys.modules["streambp_fx.passes.segment"], "EXPENSIVE", eager.expensive)
    options = {"chunk": eager.chunk, "loss_chunk": eager.loss_chunk, "seq_dim": {"ids": 1}}
    call = torch.compile(model, backend="streambp", options=options)
    for step, length in enumerate(eager.lengths):
        batch = eager.batch + (step if seed % 2 else 0)  # every other model meets several batch sizes
        ids = torch.randint(0, VOCAB, (batch, length))
        for own, run in ((eager, eager), (model, call)):
            own.zero_grad()
            loss = run(ids)
            loss.backward()
            own.last = float(loss.detach())
        where = f"{eager.plan}, loss {eager.loss!r}, {batch} x {length}, chunk {eager.chunk}"
        assert model.last == pytest.approx(eager.last, rel=1e-9, abs=1e-12), where
        _compare(eager, model, where)


def _compare(eager: RandomModel, model: RandomModel, where: str) -> None:
    wanted = {n: p.grad for n, p in eager.named_parameters()}
    total = math.sqrt(sum(float(g.square().sum()) for g in wanted.values() if g is not None))
    assert math.isfinite(total)
    for name, parameter in model.named_parameters():
        want = torch.zeros_like(parameter) if wanted[name] is None else wanted[name]
        got = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        error = float((got - want).norm())
        assert error <= 1e-9 * total, f"{where}: {name} {error}\n{streambp_fx.schedule(model)}"
