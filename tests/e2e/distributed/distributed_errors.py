"""Errors in the middle of a step of a model on several devices: what is left, and what comes next.

Each function is what one process runs, and asserts. With one process FSDP2 gathers nothing, and is otherwise
the same: it has the same states, hooks and gradients of full size.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_cases import BATCHES, ENGINES, MODELS
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record

import streambp_fx
from streambp_fx.runtime.segments.segment_runner import SegmentRunner
from streambp_fx.runtime.several_devices.sharded_parameters import StepGroups


def wrapped(engine: str, streamed: bool = True, **options: Any) -> tuple[nn.Module, nn.Module]:
    """A model, and what the engine has made of it."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = MODELS["dense"]().to(torch.float64).train()
    found = ENGINES[engine](model)
    if streamed:
        streambp_fx.transform(model, **{"chunk": 8, "check": "never", **options})
    return model, found


def gradients(model: nn.Module, rank: int, batches: int) -> list[torch.Tensor]:
    """Of a step with so many batches; gradients are summed over the devices with the last one."""
    for number in range(batches):
        model.set_requires_gradient_sync(number == batches - 1)  # type: ignore[operator]
        model(**BATCHES["even"](rank, number)).loss.backward()
    found = [p.grad.full_tensor() for p in model.parameters()]  # type: ignore[union-attr]
    model.zero_grad()
    return found


# ---- errors


@contextmanager
def in_a_chunk(
    kind: Callable[[str], BaseException], backward: bool = True, place: int = 12
) -> Iterator[None]:
    """Raised by a chunk in the middle of a layer; in the backward, those above have been summed."""
    real, calls = SegmentRunner.call, 0

    def call(runner: SegmentRunner, *given: Any) -> Any:
        nonlocal calls
        calls += (torch._C._current_graph_task_id() != -1) == backward
        if calls == place:
            raise kind("on purpose")
        return real(runner, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SegmentRunner, "call", call)
        yield
    assert calls == place


@contextmanager
def in_a_sum() -> Iterator[None]:
    """Raised when the gradients of a layer, or of all of the model, are to be summed."""

    def fails(group: Any) -> None:
        raise RuntimeError("on purpose")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.post_backward", fails
        )
        yield


@contextmanager
def before_us() -> Iterator[None]:
    """Raised by autograd between FSDP2's hook on what the model returns and the first node of ours."""

    def fails(step: StepGroups) -> None:
        raise RuntimeError("on purpose")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepGroups, "_begins", fails)
        yield


ERRORS: dict[str, tuple[type[BaseException], Callable[[], Any]]] = {
    "chunk": (RuntimeError, lambda: in_a_chunk(RuntimeError)),
    "memory": (torch.OutOfMemoryError, lambda: in_a_chunk(torch.OutOfMemoryError)),
    "interrupt": (KeyboardInterrupt, lambda: in_a_chunk(KeyboardInterrupt)),
    "sum": (RuntimeError, in_a_sum),
    "before us": (RuntimeError, before_us),
    "forward": (RuntimeError, lambda: in_a_chunk(RuntimeError, backward=False)),
}


# ---- what is left


def is_as_before_a_forward(model: nn.Module) -> None:
    """Nothing is gathered, nothing is on its way, and FSDP2 waits for the end of no backward."""
    states = [m._get_fsdp_state() for m in model.modules() if hasattr(m, "_get_fsdp_state")]
    for state in states:
        assert state._training_state.name == "IDLE"
        assert state._state_ctx.iter_forward_root is None
        assert not state._state_ctx.post_backward_final_callback_queued
        assert not state._comm_ctx.post_forward_order
        for group in state._fsdp_param_groups:
            assert group.is_sharded and group._training_state.name == "IDLE"
            assert group._all_gather_result is None and not group._post_forward_indices
    assert all(hasattr(p, "full_tensor") for p in model.parameters())


def next_step_is_right(rank: int, engine: str, batches: int, names: list[str]) -> None:
    """After each error the gradients of the next step are those of a model that has seen none."""
    expected = gradients(wrapped(engine, streamed=False)[0], rank, batches)
    model, _ = wrapped(engine)
    torch.testing.assert_close(gradients(model, rank, batches), expected, rtol=1e-9, atol=1e-12)
    schedule = streambp_fx.schedule(model)
    assert schedule is not None and all(s.chunked for s in schedule.segments)
    for name in names:
        kind, failing = ERRORS[name]
        for number in range(batches - 1):
            model.set_requires_gradient_sync(False)
            model(**BATCHES["even"](rank, number)).loss.backward()
        model.set_requires_gradient_sync(True)
        with failing(), pytest.raises(kind, match="on purpose"):
            model(**BATCHES["even"](rank, batches)).loss.backward()
        if name != "before us":  # nobody tells of it; the next forward sees it
            is_as_before_a_forward(model)
        if name == "forward" and batches > 1:  # gradients of the batches before it are not lost
            model(**BATCHES["even"](rank, batches - 1)).loss.backward()
            found = [p.grad.full_tensor() for p in model.parameters()]  # type: ignore[union-attr]
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12, msg=name)
        model.zero_grad()
        found = gradients(model, rank, batches)
        torch.testing.assert_close(
            found, expected, rtol=1e-9, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}"
        )


def ddp_is_wrapped_anew(rank: int) -> None:
    """DistributedDataParallel refuses to go on after an error; a new one around the same model is right."""

    def step(ddp: nn.Module) -> list[torch.Tensor]:
        ddp(**BATCHES["even"](rank, 0)).loss.backward()
        found = [p.grad.clone() for p in ddp.parameters() if p.grad is not None]
        ddp.zero_grad()
        return found

    expected = step(wrapped("ddp", streamed=False)[1])
    model, ddp = wrapped("ddp")
    torch.testing.assert_close(step(ddp), expected, rtol=1e-9, atol=1e-12)
    with in_a_chunk(RuntimeError), pytest.raises(RuntimeError, match="on purpose"):
        step(ddp)
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        step(ddp)
    model.zero_grad()
    ddp = ENGINES["ddp"](model)
    torch.testing.assert_close(step(ddp), expected, rtol=1e-9, atol=1e-12)


# ---- run by torchrun


@record
def train_and_die(engine: str, how: str) -> None:
    """Two steps; in the backward of the second one, the second process "raises" or is "killed"."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=10))
    rank = dist.get_rank()
    _, model = wrapped(engine)
    model(**BATCHES["even"](rank, 0)).loss.backward()
    with in_a_chunk(partial(_dies, how)) if rank == 1 else contextlib.nullcontext():
        model(**BATCHES["even"](rank, 1)).loss.backward()
    print("went through", flush=True)


def _dies(how: str, words: str) -> BaseException:
    print("dies at", time.monotonic(), flush=True)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    return RuntimeError(words)


if __name__ == "__main__":
    train_and_die(*sys.argv[1:])
