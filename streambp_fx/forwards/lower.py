"""From a captured graph of a streamed forward to what runs it."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from ..backend import compile_graph
from ..dynamo.this_backend import MARK, runs_better_in_python
from ..models.checkpointing import layers_of
from ..models.nested_models import is_of_transformers
from ..options import Options
from ..runtime.several_devices.parameter_groups import ShardedParameters
from ..runtime.step_counts import StepCounts
from ..schedule import Schedule
from ..unstreamed import Otherwise


class Captured(Protocol):
    """A forward that captures graphs, see `StreamedForward`, whose attributes these are."""

    model: nn.Module
    original: Any
    options: Options
    lower: Lower
    counts: StepCounts

    @property
    def sequence_dims(self) -> dict[str, int]:
        """Dims that carry the sequence, by the name of the input."""

    @property
    def sharded(self) -> ShardedParameters | None:
        """Parameters that an engine has sharded."""

    def report(self, schedule: Schedule) -> None:
        """Note the schedule of a graph that was compiled."""

    def may_checkpoint(self) -> bool:
        """True if a step that is not streamed may recompute layers."""

    def run(self, executor: Any, *inputs: Any) -> Any:
        """Run what was made of a graph."""


# From a streamed forward, its captured graph and example inputs to what runs the graph.
Lower = Callable[[Captured, torch.fx.GraphModule, list[Any]], Callable[..., Any]]


def stream(owner: Captured, module: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
    """What runs a captured graph streamed, or as it is if it cannot be.

    Args:
        owner: the streamed forward that has captured it.
        module: the Dynamo graph.
        example_inputs: its inputs.
    """
    report = weakref.WeakMethod(owner.report)

    def tell(schedule: Schedule) -> None:
        method = report()
        if method is not None:
            method(schedule)

    options = owner.options
    if options.logits == "drop":
        options = dataclasses.replace(options, logits="lazy")  # see `without_lazy`
    otherwise = None
    if owner.may_checkpoint():
        otherwise = Otherwise(_not_streamed, layers_of(owner.model))
    elif (
        owner.sharded is not None
        or runs_better_in_python(module)
        # a captured graph of transformers makes masks that eager does not
        or is_of_transformers(owner.model, owner.original)
    ):
        otherwise = Otherwise(_not_streamed)
    dims, sharded = owner.sequence_dims, owner.sharded
    return compile_graph(
        module,
        example_inputs,
        options,
        tell,
        dims,
        otherwise=otherwise,
        sharded=sharded,
        counts=owner.counts,
    )


class NotStreamed(Exception):
    """A graph that is not streamed was about to run: the model can do better by itself."""


def _not_streamed(*inputs: Any) -> Any:
    raise NotStreamed


def lowered(owner: weakref.ref[Captured], module: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
    """The backend of one streamed forward.

    NOTE [what PyTorch keeps]: it holds each backend until `torch._dynamo.reset()`, and what the backend gave
    as long as there is code that calls it. If these held the model, its weights would stay after `del model`.

    Args:
        owner: the streamed forward.
        module: the Dynamo graph.
        example_inputs: its inputs.
    """

    def alive() -> Captured:
        found = owner()
        assert found is not None, "called by its owner alone"
        return found

    executor = alive().lower(alive(), module, example_inputs)
    return lambda *inputs: alive().run(executor, *inputs)


setattr(lowered, MARK, True)
