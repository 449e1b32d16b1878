"""body="inductor": chunk programs compiled by Inductor, once for each distinct one and not for each chunk."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from e2e_check import assert_close_grads, step
from e2e_models import CHUNK, LOSS_CHUNK, build, padded, plain
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

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


@pytest.mark.slow
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


class NoSine(TorchDispatchMode):
    """Every sine is zero."""

    only_observes = True  # a lie, for this test

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return torch.zeros_like(found) if func is torch.ops.aten.sin.default else found


@pytest.fixture
def uncached() -> Iterator[None]:
    """Inductor makes programs anew: what it finds on disk may have been made by another compiler of ours."""
    with torch._inductor.config.patch(force_disable_caches=True):
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("uncached")
def test_a_program_is_compiled_outside_of_the_modes_of_a_step() -> None:
    """The first step that runs it may be within a mode; later ones are not."""
    x = torch.linspace(0, 1, 7)
    program = make_fx(lambda x: [x.sin() * 2])(x)
    with NoSine():
        run = lower._compiled_by_inductor(program, [x])
    torch.testing.assert_close(run(x), [x.sin() * 2])


@pytest.mark.slow
@pytest.mark.usefixtures("uncached")
def test_inductor_with_a_mask_and_dropout(compilations: list[Any]) -> None:
    """The same chunk is drawn twice, forwards and recomputed, with the same mask, after a self-check."""
    model = build("gpt2", dtype=torch.float32, resid_pdrop=0.2, n_layer=1)
    streamed = {}
    for body in ("eager", "inductor"):
        own = copy.deepcopy(model)
        streambp_fx.transform(own, chunk=CHUNK, loss_chunk=LOSS_CHUNK, body=body)
        torch.manual_seed(3)
        streamed[body] = step(own, padded(37, "right"))
    assert_close_grads(streamed["inductor"][1], streamed["eager"][1], 1e-5)
    assert compilations
