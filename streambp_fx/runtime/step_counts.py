"""How many training steps of a model were streamed and how many were not, and why not."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ..versions.differences import fsdp_groups
from .live_objects import Registry

# Different reasons that are kept; a message with a number in it would be another one in every step.
MOST_REASONS = 20


class OfParameters(Protocol):
    """What is found by the parameters that it reads."""

    @property
    def parameters(self) -> list[weakref.ref[torch.nn.Parameter]]:
        """They are not kept alive."""


G = TypeVar("G", bound=OfParameters)


class StepCounts:
    """The training steps of one model, or of one graph, as they ran.

    Attributes:
        streamed, unstreamed: steps.
        why: of the last step, why it was not streamed; None if it was, or if there was none.
        reasons: how many steps were not streamed, by reason.
        began: when it became as the last step was, streamed or not, in seconds since the epoch.
        began_with: the number of the step with which it became so, from 1.
        last: when the last step was, in seconds since the epoch.
    """

    def __init__(self) -> None:
        self.streamed = self.unstreamed = 0
        self.why: str | None = None
        self.reasons: dict[str, int] = {}
        self.began, self.began_with = time.time(), 0
        self.last = self.began
        self._lock = threading.Lock()

    @property
    def total(self) -> int:
        """How many steps there were, streamed or not."""
        return self.streamed + self.unstreamed

    @property
    def is_streamed(self) -> bool:
        """True if the last step was streamed."""
        return self.total > 0 and self.why is None

    def note(self, why: str | None = None, inputs: Sequence[Any] = ()) -> None:
        """Count a step.

        Args:
            why: it was not streamed; None: it was.
            inputs: of the graph, where it is one.
        """
        with self._lock:
            self._served(inputs)
            self.last = time.time()
            if self.total == 0 or (why is None) != (self.why is None):
                self.began, self.began_with = self.last, self.total + 1
            self.why = why
            if why is None:
                self.streamed += 1
                return
            self.unstreamed += 1
            if why in self.reasons or len(self.reasons) < MOST_REASONS:
                self.reasons[why] = self.reasons.get(why, 0) + 1

    def ended(self, why: str) -> StepCounts:
        """The same steps, after which there are no more, from now on.

        Args:
            why: there are no more.
        """
        found = together([self])
        found.why, found.began, found.began_with = why, time.time(), 0
        return found

    def _served(self, inputs: Sequence[Any]) -> None:
        """Take note of whose step it is."""


class GraphCounts(StepCounts):
    """The steps of a graph that `torch.compile` runs; found by its parameters, see NOTE [finding schedules].

    Dynamo runs one graph for all models that have the same code and sizes: their steps are counted together.

    Args:
        example_inputs: of the graph, parameters among them.

    Attributes:
        parameters: of the models it has served.
    """

    def __init__(self, example_inputs: Sequence[Any]) -> None:
        super().__init__()
        self.parameters: list[weakref.ref[torch.nn.Parameter]] = []
        self._place = next(
            (i for i, v in enumerate(example_inputs) if isinstance(v, torch.nn.Parameter)), None
        )
        self._known = WeakIdKeyDictionary()
        self._served(example_inputs)
        _counted.add(self)

    def _served(self, inputs: Sequence[Any]) -> None:
        if self._place is None or not inputs or inputs[self._place] in self._known:
            return
        self._known[inputs[self._place]] = True
        self.parameters = [r for r in self.parameters if r() is not None] + parameters_of(inputs)


_counted: Registry[GraphCounts] = Registry()


def together(counts: Iterable[StepCounts]) -> StepCounts:
    """The steps of several: of the graphs of a model, or of models within one. The last step counts."""
    found = StepCounts()
    parts = [c for c in counts if c.total]
    for part in parts:
        found.streamed += part.streamed
        found.unstreamed += part.unstreamed
        for why, count in part.reasons.items():
            found.reasons[why] = found.reasons.get(why, 0) + count
    if parts:
        latest = max(parts, key=lambda c: c.last)
        found.why, found.last = latest.why, latest.last
        found.began, found.began_with = latest.began, latest.began_with
        otherwise = (c.last for c in parts if c.is_streamed != latest.is_streamed)
        if max(otherwise, default=found.began) > found.began:  # a step of another graph came between
            found.began, found.began_with = latest.last, found.total
    return found


def counts_of(module: torch.nn.Module) -> list[StepCounts]:
    """The steps of all graphs that `torch.compile` runs and that read a parameter of `module`."""
    return list(those_of(module, _counted))


def those_of(module: torch.nn.Module, graphs: Iterable[G]) -> list[G]:
    """Of compiled graphs (that have `parameters`, weakly) those that read a parameter of `module`."""
    own = {id(p) for p in (*module.parameters(), *_in_full_size(module))}
    return [g for g in graphs if any(r() is not None and id(r()) in own for r in g.parameters)]


def _in_full_size(module: torch.nn.Module) -> list[torch.Tensor]:
    """What a graph reads where FSDP2 stores pieces of parameters: modules have it within a forward alone."""
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    from torch.distributed.fsdp import FSDPModule

    states = (m._get_fsdp_state() for m in module.modules() if isinstance(m, FSDPModule))
    params = (p for s in states for g in fsdp_groups(s) for p in g.fsdp_params)
    return [p._unsharded_param for p in params if hasattr(p, "_unsharded_param")]


def parameters_of(inputs: Sequence[Any]) -> list[weakref.ref[torch.nn.Parameter]]:
    """The parameters, of any shape and dtype, among the inputs of a graph; they are not kept alive."""
    return [weakref.ref(v) for v in inputs if isinstance(v, torch.nn.Parameter)]
