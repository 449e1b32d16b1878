"""Dispatch modes around a step: what may change ops is not streamed, and what only observes is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from e2e_check import assert_all_chunked, assert_close_grads, grads, in_double
from e2e_models import CHUNK, LOSS_CHUNK, build, plain, sample
from torch.utils._python_dispatch import TorchDispatchMode

import streambp_fx
from streambp_fx import StreamBPWarning, status

OPTIONS = {"chunk": CHUNK, "loss_chunk": LOSS_CHUNK}
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


class Scaled(TorchDispatchMode):
    """Products are others, as where a number format is emulated."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 1.25 if func in PRODUCTS else found


class Counted(TorchDispatchMode):
    only_observes = True
    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.total += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def step(model: Any, call: Any, mode: TorchDispatchMode) -> Any:
    model.zero_grad()
    with mode:
        call(**plain(2, 37)).loss.backward()
    return grads(model)


@pytest.mark.parametrize("first", sample([True, False], True))
def test_a_mode_that_changes_ops_runs_unstreamed(first: bool) -> None:
    with in_double(lambda: build("llama")):
        eager = build("llama", num_hidden_layers=1)
        model = copy.deepcopy(eager)
        call = streambp_fx.transform(model, **OPTIONS)
        if not first:
            call(**plain(2, 37)).loss.backward()
            assert_all_chunked(model)
        with pytest.warns(StreamBPWarning, match=r"Scaled is a dispatch mode.*runs unstreamed"):
            found = step(model, call, Scaled())
        assert_close_grads(found, step(eager, eager, Scaled()), 1e-12)
        call(**plain(2, 37)).loss.backward()
    assert status(model).unstreamed_steps == 1 and status(model).streamed_steps == 2 - first


@pytest.mark.slow
def test_a_mode_that_observes_is_streamed() -> None:
    with in_double(lambda: build("llama")):
        eager = build("llama", num_hidden_layers=1)
        model = copy.deepcopy(eager)
        mode = Counted()
        found = step(model, streambp_fx.transform(model, **OPTIONS), mode)
        assert_close_grads(found, step(eager, eager, Counted()), 1e-9)
    assert_all_chunked(model)
    assert mode.total > 100


def test_a_mode_in_the_backward_alone_is_an_error() -> None:
    model = streambp_fx.transform(build("llama", num_hidden_layers=1), **OPTIONS)
    loss = model(**plain(2, 37)).loss
    with pytest.raises(RuntimeError, match=r"Scaled is a dispatch mode.*in the backward"), Scaled():
        loss.backward()


@pytest.mark.parametrize("first", sample([True, False], True))
def test_the_compiler_leaves_modes_alone_and_that_is_said_once(first: bool) -> None:
    """Any mode: Dynamo does not ask what it does. Others' backends are not spoken of."""
    model = build("llama", num_hidden_layers=1)
    call = torch.compile(model, backend="streambp", options=OPTIONS)
    if not first:
        call(**plain(2, 37)).loss.backward()
    with pytest.warns(StreamBPWarning, match=r"Counted is active.*torch\._dynamo\.reset") as said:
        step(model, call, Counted())
        step(model, call, Counted())
    assert len(said) == 1
    torch._dynamo.reset()
    call(**plain(2, 37)).loss.backward()
    assert status(model).streamed_steps == 1
    other = build("llama", num_hidden_layers=1)
    step(other, torch.compile(other, backend="eager"), Counted())
