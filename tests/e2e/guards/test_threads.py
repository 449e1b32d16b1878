"""Several threads train models of their own in one process, and trace programs while others run steps."""

from __future__ import annotations

import copy
import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from e2e_check import assert_close_grads, grads, in_double
from e2e_models import CHUNK, build, plain, sample
from e2e_subject import Subject
from torch.fx import Tracer, _symbolic_trace

import streambp_fx
from streambp_fx.forwards.unstreamed_steps import resting
from streambp_fx.passes.graph.tracing import trace

LLAMA = functools.partial(build, "llama", num_hidden_layers=1)
LENGTHS = (33, 41)


def is_traced() -> bool:
    """True if FX takes this thread to be tracing; before PyTorch 2.14 all threads have one flag."""
    asked = getattr(_symbolic_trace, "_get_is_fx_tracing", None)
    return bool(_symbolic_trace._is_fx_tracing_flag if asked is None else asked())


def in_threads(*jobs: Callable[[], None]) -> None:
    """Run all at once; the first error is raised."""
    errors: list[BaseException] = []

    def guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    if errors:
        raise errors[0]


def streamed(door: str, model: Any) -> Any:
    if door == "transform":
        return streambp_fx.transform(model, chunk=CHUNK)
    return torch.compile(model, backend="streambp", options={"chunk": CHUNK})


def train(eager: Any, model: Any, call: Any, batches: list[dict[str, Any]]) -> None:
    for batch in batches:
        eager.zero_grad()
        eager(**batch).loss.backward()
        model.zero_grad()
        call(**batch).loss.backward()
        assert_close_grads(grads(model), grads(eager), 1e-9)


@pytest.mark.parametrize("door", sample(["transform", "compile"], "transform"))
def test_two_threads_train_two_models_and_a_third_step_follows(door: str) -> None:
    torch._dynamo.reset()
    with in_double(LLAMA):
        pairs = []
        for heads in (4, 2):
            eager = LLAMA(num_attention_heads=heads, num_key_value_heads=2)
            pairs.append((eager, copy.deepcopy(eager)))
        calls = [(eager, model, streamed(door, model)) for eager, model in pairs]
        batches = [[plain(2, t + k) for t in LENGTHS] for k in range(2)]
        in_threads(
            *(functools.partial(train, *own, given) for own, given in zip(calls, batches, strict=True))
        )
        assert not is_traced()
        for own in calls:
            train(*own, [plain(2, 49)])
            assert all(s.chunked for s in streambp_fx.schedule(own[1]).segments)


@pytest.mark.slow
def test_a_step_is_streamed_while_another_thread_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch says to all threads that one of them compiles."""
    with in_double(LLAMA):
        eager = LLAMA()
        model = streambp_fx.transform(copy.deepcopy(eager), chunk=CHUNK)
        monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
        train(eager, model, model, [plain(2, t) for t in LENGTHS])
        assert all(s.chunked for s in streambp_fx.schedule(model).segments)


def test_a_trace_is_not_seen_by_other_threads() -> None:
    seen: list[tuple[bool, Any]] = []
    call = torch.nn.Module.__call__

    def look(x: Any) -> Any:
        other = threading.Thread(target=lambda: seen.append((is_traced(), torch.nn.Module.__call__)))
        other.start()
        other.join()
        return x * 2

    graph = trace(look, torch.ones(3))
    assert seen == [(False, call)]
    assert torch.equal(graph(torch.full((3,), 3.0)), torch.full((3,), 6.0))
    assert "trace" in vars(Tracer) and "trace" not in vars(torch.fx.experimental.proxy_tensor.PythonKeyTracer)


def test_traces_of_many_threads_stay_apart() -> None:
    def job(k: int) -> None:
        for _ in range(20):
            made = trace(lambda x: [x * k, torch.nn.functional.silu(x)], torch.ones(2))
            assert torch.equal(made(torch.ones(2))[0], torch.full((2,), float(k)))

    in_threads(*(functools.partial(job, k) for k in range(4)))
    assert not is_traced()


def test_many_threads_transform_and_ask() -> None:
    def job() -> None:
        for _ in range(100):
            model = streambp_fx.transform(Subject())
            assert streambp_fx.schedule(model) is None
            streambp_fx.restore(model)

    in_threads(*[job] * 4)


def test_an_unstreamed_step_leaves_the_models_of_other_threads_streamed() -> None:
    """What is within a model that runs unstreamed rests in that call only."""
    model = LLAMA()
    streambp_fx.transform(model, chunk=CHUNK)
    backbone = model.model.forward
    seen: list[bool] = []

    def look(*_: Any) -> None:
        seen.append(backbone in resting.get())
        other = threading.Thread(target=lambda: seen.append(backbone in resting.get()))
        other.start()
        other.join()

    model.model.layers[0].register_forward_hook(look)
    with pytest.warns(streambp_fx.StreamBPWarning, match="unstreamed"):
        model(**plain(2, 33), output_hidden_states=True)
    assert seen == [True, False] and backbone not in resting.get() and backbone.active
