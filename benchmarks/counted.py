"""Live bytes of a step that is too large to run: the runtime itself, on tensors that have no memory.

python -m benchmarks.counted                                   # Qwen3-8B's shape, cut to 2 and 4 layers
python -m benchmarks.counted --layers 2 --tokens 8192,16384 --chunk 2000 --save attention
python -m benchmarks.counted --layers 2 --tokens 1000000 --offload disk    # what is kept lies elsewhere
python -m benchmarks.counted --layers 2 --tokens 1000000 --offload disk --offload-rows    # all rows do

The compiled step runs forward and backward as ever, on fake tensors: buffers are made and let go in the same
order, and their bytes are counted op by op (`streambp_fx.measure.live_bytes`). Beside them stands what the
cost model predicts. Weights, their gradients (which are there before the step) and the inputs do not count.
The dtype is bfloat16. Takes seconds a layer and 8192 tokens; what kernels need inside is not seen. With
`--offload` tensors leave and come back when the store's do, and do not count while they are elsewhere.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node
from torch.utils._python_dispatch import _disable_current_modes

import streambp_fx
from streambp_fx.measure.live_bytes import LiveBytes
from streambp_fx.passes.graph.facts import expression
from streambp_fx.runtime import executor as executors
from streambp_fx.runtime.executor import Executor
from streambp_fx.runtime.offload import Store, Stored
from streambp_fx.runtime.segments import rows_elsewhere
from streambp_fx.runtime.segments.loss_head import LIMITS
from streambp_fx.runtime.segments.questions_to_data import Questions
from streambp_fx.runtime.segments.segment_runner import SegmentRunner
from streambp_fx.schedule import Schedule

from .gpu_models import DENSE
from .gpu_steps import make_model
from .tables import MIB

# A device that the model is not on; nothing is allocated on it.
ELSEWHERE = "meta"


class Elsewhere(Store):
    """A store of tensors without memory: held until what they belong to has left, made anew to come back."""

    def __init__(self, resident: Iterable[torch.Tensor]) -> None:
        super().__init__(resident)
        self.leaving: list[tuple[int, torch.Tensor]] = []

    def settle(self, group: int) -> None:
        self.leaving = [(of, tensor) for of, tensor in self.leaving if of > group]

    def send(self, stored: Stored, tensor: torch.Tensor) -> None:
        self.leaving.append((stored.group, tensor))

    def fetch(self, stored: Stored) -> torch.Tensor:
        shape, stride, dtype, device = stored.like
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)

    def receive(self, arriving: torch.Tensor) -> torch.Tensor:
        self.settle(len(self.groups))
        return arriving


def _elsewhere(place: str, device: torch.device, resident: Iterable[torch.Tensor]) -> Store:
    return Elsewhere(resident)


def counted(schedule: Schedule, tokens: int) -> int:
    """Peak bytes of the tensors alive in one step of a schedule, for one sequence without padding.

    Args:
        schedule: from `streambp_fx.explain` with a batch size of 1.
        tokens: of the sequence.
    """
    executor = Executor(schedule.facts, schedule.options)
    meter = LiveBytes()
    with FakeTensorMode() as mode, _without_data(), _rows_elsewhere(mode, meter):
        executor.constants = {
            n: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v
            for n, v in executor.constants.items()
        }
        sizes = {**schedule.facts.values, schedule.facts.sequence: tokens}
        inputs = [_input(schedule, n, sizes) for n in executor.placeholders]
        given = [t for t in inputs if isinstance(t, torch.Tensor)]
        known = [*given, *(t.grad for t in given if t.grad is not None)]
        meter.ignore(known)
        _step(executor, inputs)  # traces the programs
        with meter:
            _step(executor, inputs)
    return meter.peak


def _step(executor: Executor, inputs: list[Any]) -> None:
    executor(*inputs)[0].backward()


def _input(schedule: Schedule, node: Node, sizes: Any) -> Any:
    """An input of the graph at these sizes; a parameter has its gradient already."""
    value = node.meta["val"]
    number = lambda size: int(expression(size).subs(sizes))  # noqa: E731
    if not isinstance(value, torch.Tensor):
        return number(value)
    made = torch.empty([number(s) for s in value.shape], dtype=value.dtype, device=value.device)
    if node in schedule.facts.needs_grad:
        made.requires_grad_()
        made.grad = torch.empty_like(made)
    return made


@contextlib.contextmanager
def _without_data() -> Iterator[None]:
    """Within: what a step asks the data is answered as if all rows counted; programs are traced as ever."""
    program = SegmentRunner.program

    def answered(questions: Questions) -> None:
        for key, value in questions._open.items():
            questions._answers[key] = [sys.maxsize if key == LIMITS else 1] * value.numel()
        questions._open.clear()

    def traced(*args: Any) -> Any:
        with _disable_current_modes():
            return program(*args)

    with (
        mock.patch.object(Questions, "_read", answered),
        mock.patch.object(SegmentRunner, "program", traced),
        mock.patch.object(executors, "store_for", _elsewhere),
    ):
        yield


@contextlib.contextmanager
def _rows_elsewhere(mode: FakeTensorMode, meter: LiveBytes) -> Iterator[None]:
    """Within: rows elsewhere are tensors of another device, and do not count; those of a chunk do."""

    def there(tensor: torch.Tensor) -> bool:
        return tensor.device.type == ELSEWHERE

    def empty(shape: Sequence[int], dtype: torch.dtype, place: str, zero: bool = False) -> torch.Tensor:
        with _disable_current_modes(), mode:
            found = torch.empty(tuple(shape), dtype=dtype, device=ELSEWHERE)
        meter.ignore([found])
        return found

    with (
        mock.patch.object(rows_elsewhere, "empty", empty),
        mock.patch.object(rows_elsewhere, "is_elsewhere", there),
        mock.patch.object(rows_elsewhere, "scale_", lambda tensor, factor: None),
        mock.patch.object(rows_elsewhere, "_advise", lambda rows, advice: None),
    ):
        yield


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; prints the table in Markdown."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.counted", description=__doc__.split("\n")[0])
    numbers = lambda text: [int(v) for v in text.split(",")]  # noqa: E731
    parser.add_argument("--layers", type=numbers, default=[2, 4], metavar="N,N")
    parser.add_argument("--tokens", type=numbers, default=[8192, 16384], metavar="N,N")
    parser.add_argument("--chunk", type=int, default=2000)
    parser.add_argument("--save", choices=("inputs", "attention"), default="inputs")
    parser.add_argument("--offload", choices=("none", "disk"), default="none")
    parser.add_argument("--offload-rows", action="store_true")
    parser.add_argument("--accumulate", choices=("float32", "weights"), default="float32")
    args = parser.parse_args(argv)
    given = {name: getattr(args, name) for name in ("save", "offload", "offload_rows", "accumulate")}
    print("| layers | tokens | predicted, MiB | counted, MiB |\n|---|---|---|---|")
    for layers in args.layers:
        model = make_model({**DENSE, "num_hidden_layers": layers}, "meta", torch.bfloat16)
        for tokens in args.tokens:
            schedule = streambp_fx.explain(model, tokens, chunk=args.chunk, **given)
            predicted = schedule.cost.peak(schedule.cost.sizes(tokens)).total
            found = counted(schedule, tokens)
            share = f"{predicted / found - 1:+.2%}"
            print(
                f"| {layers} | {tokens:,} | {predicted / MIB:,.1f} | {found / MIB:,.1f} ({share}) |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
