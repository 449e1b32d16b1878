"""What is not streamed runs with its layers checkpointed: as exact, and in no more memory than that takes."""

from __future__ import annotations

import contextlib
import copy
import types
from typing import Any

import pytest
import torch
from e2e_check import step
from e2e_models import build as dense
from e2e_models import plain, set_dropout
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

import streambp_fx
from benchmarks.families.configs import build
from benchmarks.families.worker import batch
from streambp_fx.measure.live_bytes import peak_live_bytes
from streambp_fx.models.checkpointing import layers_checkpointed, may_be_checkpointed

UNSTREAMED = pytest.warns(streambp_fx.StreamBPWarning, match="unstreamed")


def peak(model: Any, given: dict[str, torch.Tensor]) -> int:
    known = [*model.parameters(), *model.buffers(), *given.values()]
    model.zero_grad(set_to_none=True)
    return peak_live_bytes(lambda: model(**given).loss.backward(), known)


def switches(model: nn.Module) -> dict[str, dict[str, Any]]:
    """What the modules have of checkpointing."""
    return {
        name: {n: v for n, v in vars(module).items() if "checkpointing" in n}
        for name, module in model.named_modules()
    }


SLOW = [pytest.param(family, marks=pytest.mark.slow) for family in ("deepseek_v4", "longcat_flash")]


@pytest.mark.parametrize("family", SLOW)
def test_no_more_memory_than_checkpointing(family: str) -> None:
    """It compresses rows; it is not captured."""
    model, given = build(family), batch(256, (0,))
    eager, checkpointed = copy.deepcopy(model), copy.deepcopy(model)
    checkpointed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    streambp_fx.transform(model, chunk=64)
    before = switches(model)
    torch.manual_seed(0)
    want_loss, want = step(eager, given)
    torch.manual_seed(0)
    with UNSTREAMED:
        loss, got = step(model, given)
    assert loss.equal(want_loss)
    assert got.keys() == want.keys()
    assert [n for n in got if got[n] is None] == [n for n in want if want[n] is None]
    assert all(torch.allclose(got[n], g, rtol=1e-5, atol=1e-7) for n, g in want.items() if g is not None)
    assert switches(model) == before
    assert peak(model, given) <= 1.01 * peak(checkpointed, given)
    assert family == "longcat_flash" or peak(model, given) < 0.9 * peak(eager, given)


def test_random_numbers_are_those_of_eager() -> None:
    model = dense("llama", dtype=torch.float64)
    set_dropout(model.config, 0.1)
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1
    given = plain(2, 33)
    torch.manual_seed(0)
    want_loss, want = step(copy.deepcopy(model), given)
    torch.manual_seed(0)
    with layers_checkpointed(model):
        loss = model(**given, use_cache=False).loss
    loss.backward()
    assert loss.equal(want_loss)
    assert all(torch.allclose(p.grad, want[n], rtol=1e-12) for n, p in model.named_parameters() if n in want)


def test_whose_layers_may_be_computed_twice() -> None:
    model = dense("llama")
    assert may_be_checkpointed(model)
    hook = model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    assert not may_be_checkpointed(model), "a hook would be called twice"
    hook.remove()
    assert may_be_checkpointed(model)
    norm = model.model.norm
    model.model.norm = type("Own", (nn.Module,), {"__module__": "theirs"})()
    assert not may_be_checkpointed(model), "nobody said that it can be computed twice"
    model.model.norm = norm
    model.model.norm.forward = types.MethodType(lambda self, x: x, norm)
    assert not may_be_checkpointed(model), "a forward of its own may do anything"
    del model.model.norm.forward
    assert may_be_checkpointed(streambp_fx.transform(model))
    assert not may_be_checkpointed(nn.Linear(2, 2))


@pytest.mark.parametrize("made_of", ["spectral", "statistics", "another"])
def test_a_layer_that_changes_a_buffer_runs_once(made_of: str) -> None:
    """In place, or by putting another one in its place; the layers beside it are checkpointed."""

    class Counted(nn.Linear):
        __module__ = "torch.nn"  # as if the library had it

        def forward(self, x: Tensor) -> Tensor:
            self.calls = self.calls + 1
            return super().forward(x) * self.calls

    Counted.forward.__module__ = "torch.nn"

    def built() -> Any:
        torch.manual_seed(0)
        model = dense("llama", dtype=torch.float64).train()
        mlp = model.model.layers[0].mlp
        if made_of == "spectral":
            spectral_norm(mlp.down_proj)
        elif made_of == "statistics":
            mlp.down_proj = nn.Sequential(mlp.down_proj, nn.InstanceNorm1d(33, track_running_stats=True))
        else:
            counted = Counted(mlp.down_proj.in_features, mlp.down_proj.out_features, bias=False).double()
            counted.register_buffer("calls", torch.zeros((), dtype=torch.float64))
            mlp.down_proj = counted
        set_dropout(model.config, 0.1)
        return model.double()

    given = plain(2, 33)
    want, model = built(), built()
    model.load_state_dict(want.state_dict())
    assert may_be_checkpointed(model)
    for _ in range(2):
        losses = []
        for own, within in ((want, contextlib.nullcontext()), (model, layers_checkpointed(model))):
            torch.manual_seed(1)
            own.zero_grad()
            with within:
                loss = own(**given, use_cache=False).loss
            loss.backward()
            losses.append(loss)
        assert losses[0].equal(losses[1])
        for (name, a), b in zip(want.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(b.grad, a.grad, rtol=1e-12, atol=1e-14, msg=name)
        for (name, a), b in zip(want.named_buffers(), model.buffers(), strict=True):
            assert a.equal(b), name


def test_what_was_on_stays_on() -> None:
    model = dense("llama")
    model.gradient_checkpointing_enable()
    known = {n: dict(vars(m)) for n, m in model.named_modules()}
    with layers_checkpointed(model):
        pass
    assert {n: dict(vars(m)) for n, m in model.named_modules()} == known


class Regions(nn.Module):
    """Not streamed because of a hook; its regions are given rows with or without a gradient."""

    def __init__(self, detached: bool, nested: bool = False) -> None:
        super().__init__()
        self.embed, self.first, self.second = nn.Embedding(13, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.detached, self.nested = detached, nested

    def forward(self, ids: Tensor) -> Tensor:
        x = self.first(self.embed(ids))
        x.register_hook(lambda g: 2 * g)
        return self.outer(x).square().mean()

    def outer(self, x: Tensor) -> Tensor:
        if self.nested:
            return checkpoint(self.region, x, use_reentrant=False)
        return self.region(x)

    def region(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.second, x.detach() if self.detached else x, use_reentrant=True)


@pytest.mark.parametrize("nested", [False, True])
def test_one_graph_gives_no_gradient_that_eager_does_not(nested: bool) -> None:
    """Eager leaves None where a reentrant region is given nothing with a gradient; Dynamo does not."""
    ids = torch.arange(26).remainder(13).view(2, 13)
    given = Regions(detached=False, nested=nested).double()
    call = torch.compile(copy.deepcopy(given), backend="streambp", options={"chunk": 4}, fullgraph=True)
    with UNSTREAMED:
        call(ids).backward()
    given(ids).backward()
    assert all(
        torch.allclose(p.grad, q.grad) for p, q in zip(given.parameters(), call.parameters(), strict=True)
    )

    torch._dynamo.reset()
    call = torch.compile(
        Regions(detached=True, nested=nested), backend="streambp", options={"chunk": 4}, fullgraph=True
    )
    with UNSTREAMED, pytest.raises(streambp_fx.CaptureError, match="fullgraph=True, which allows no Python"):
        call(ids)
