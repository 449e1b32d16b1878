"""A whole training step that is compiled: forward, backward, optimizer, as in PyTorch's tutorials."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from e2e_check import assert_all_chunked, in_double
from e2e_models import build, plain, sample
from torch import Tensor, nn

import streambp_fx
from streambp_fx import backend
from streambp_fx.dynamo.garbage import THRESHOLDS, fewer_collections


def backward(model: nn.Module, loss: Tensor) -> None:
    loss.backward()


def by_grad(model: nn.Module, loss: Tensor) -> None:
    parameters = list(model.parameters())
    for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        p.grad = gradient


def after_a_break(model: nn.Module, loss: Tensor) -> None:
    torch._dynamo.graph_break()
    loss.backward()


def training_step(model: nn.Module, call: Any, differentiate: Callable, read: bool) -> Callable[..., Any]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(**batch: Tensor) -> Any:
        optimizer.zero_grad()
        out = call(**batch)
        right = (out.logits.argmax(-1) == batch["labels"]).sum() if read else None
        differentiate(model, out.loss)
        optimizer.step()
        return out.loss.detach(), right

    return step


WAYS = {"backward": backward, "torch.autograd.grad": by_grad, "after a graph break": after_a_break}
#: Who compiles the step, and the model in it.
DOORS = ("the step", "a transformed model")
CASES = [(door, way, read) for door in DOORS for way in WAYS for read in (False, True)]


@pytest.mark.parametrize(
    ("door", "way", "read"),
    sample(CASES, ("a transformed model", "backward", True)),
)
@pytest.mark.filterwarnings("ignore:Profiler record function")
def test_a_compiled_step(door: str, way: str, read: bool) -> None:
    torch._dynamo.reset()
    with in_double(lambda: build("llama")):
        model = build("llama").double()
        eager = copy.deepcopy(model)
        options: dict[str, Any] = {"backend": "streambp", "options": {"chunk": 8}}
        call: Any = model
        if door == "a transformed model":
            streambp_fx.transform(model, chunk=8, logits="lazy")
        if door != "the step":
            options = {"backend": "aot_eager"}
        got_of = torch.compile(training_step(model, call, WAYS[way], read), **options)
        want_of = training_step(eager, eager, WAYS[way], read)
        for length in (33, 33, 21):
            batch = plain(2, length)
            (want, rights), (got, right) = want_of(**batch), got_of(**batch)
            torch.testing.assert_close(got, want, rtol=1e-9, atol=0)
            assert right == rights or not read
        for (name, p), q in zip(eager.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(q, p, rtol=1e-7, atol=1e-9, msg=name)
    assert_all_chunked(model)


@pytest.mark.slow
@pytest.mark.parametrize("door", ["the step", "a transformed model", "a compiled model"])
@pytest.mark.filterwarnings("ignore:what comes behind the graph break")
def test_compiled_autograd(door: str) -> None:
    """Autograd's graph is compiled too: the streamed backward is called from it as it is."""
    torch._dynamo.reset()
    with in_double(lambda: build("llama")):
        model = build("llama").double()
        eager = copy.deepcopy(model)
        options: dict[str, Any] = {"backend": "streambp", "options": {"chunk": 8}}
        call: Any = model
        if door == "a transformed model":
            call, options = streambp_fx.transform(model, chunk=8), {"backend": "aot_eager"}
        if door == "a compiled model":
            call = torch.compile(model, **options)

        def step(**batch: Tensor) -> Tensor:
            loss = call(**batch).loss
            loss.backward()
            return loss.detach()

        batch = plain(2, 33)
        eager(**batch).loss.backward()
        with torch._dynamo.config.patch(compiled_autograd=True):
            (step if door == "a compiled model" else torch.compile(step, **options))(**batch)
        for (name, p), q in zip(eager.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-9, atol=1e-12, msg=name)
    assert_all_chunked(model)


@pytest.fixture
def thresholds() -> Iterator[tuple[int, int, int]]:
    """Of Python's garbage collector, of this test's own."""
    before = gc.get_threshold()
    gc.set_threshold(701, 11, 12)
    yield 701, 11, 12
    gc.set_threshold(*before)


@pytest.mark.slow
def test_garbage_is_looked_for_less_often_while_a_frame_is_compiled(
    monkeypatch: pytest.MonkeyPatch, thresholds: tuple[int, int, int]
) -> None:
    """And as often as before when it has been, even if that failed."""
    seen, real = [], backend.analyze

    def analyze(*args: Any) -> Any:
        seen.append(gc.get_threshold())
        if len(seen) == 2:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(backend, "analyze", analyze)
    for ends in (contextlib.nullcontext(), pytest.raises(KeyboardInterrupt)):
        torch._dynamo.reset()
        model = streambp_fx.transform(build("llama"), chunk=8)
        with ends:
            model(**plain(1, 20)).loss.backward()
        assert gc.get_threshold() == thresholds
    assert seen == [THRESHOLDS] * 2


def test_garbage_of_compilations_in_several_threads(thresholds: tuple[int, int, int]) -> None:
    """The last that ends puts the thresholds back. A collector that is off stays off."""
    first, second = fewer_collections(), fewer_collections()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_threshold() == THRESHOLDS
    second.__exit__(None, None, None)
    assert gc.get_threshold() == thresholds
    gc.set_threshold(0)
    with fewer_collections():
        assert gc.get_threshold()[0] == 0
