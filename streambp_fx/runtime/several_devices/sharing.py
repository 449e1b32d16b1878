"""A step whose rows lie on several devices: what is the same on all of them, and what is summed."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import Node

from ...errors import InputError
from ...passes.graph.facts import Facts
from ...passes.s6_schedule.program import Group, Layers, StepInstruction, flat, unrolled
from ..lazy_tensors import Anew
from ..segments.own_rows import OwnRows, all_gather, as_numbers, is_alone
from ..segments.segment_runner import SegmentRunner
from ..step_interpreter import StepFrame
from ..step_kinds import Draws
from .shared_values import CountedOnce, Summed

NOT_READ = (
    "these logits are computed when they are read, from rows that lie on several devices. Compute the loss "
    'within the model (labels=...), or have all logits on each device: logits="keep".'
)
OTHERS = (
    "the devices that share a sequence must have the same weights and be given the same batch: each takes "
    "its own rows of it. {what} differ between device 0 and device {other} of the mesh."
)
#: What is compared.
COMPARED = (
    "Shapes of inputs",
    "Numbers in the inputs",
    "Weights",
    "States of the random generators (of a model that draws numbers: call torch.manual_seed on all alike)",
    "The options every or exchange, which say when rows are exchanged,",
)


class Sharing:
    """How the steps of a graph are shared.

    Args:
        mesh: a device mesh of one dim; None: they are not.
        facts, runners: of the graph; the runners by segment, None for one that always runs unchunked.
        random: the model draws random numbers.
    """

    def __init__(
        self, mesh: Any, facts: Facts, runners: Sequence[SegmentRunner | None], random: bool
    ) -> None:
        self.random, self._weights_agree = random, False
        self.group = None if mesh is None or mesh.size() == 1 else mesh.get_group()
        self.in_turn = any(r is not None and r.programs.in_turn for r in runners)
        made = {n for s in facts.segments for n in s.outputs}
        self.by_segments = made - {n for n in facts.nodes if n.op == "placeholder"}

    @property
    def is_on(self) -> bool:
        """What runs now is shared: a step in training, on all devices. An evaluation may be of one alone."""
        return self.group is not None and torch.is_grad_enabled() and not is_alone()

    def rows(self, tokens: int) -> OwnRows | None:
        """Whose rows of a sequence are whose; None if all are this device's."""
        return OwnRows(self.group, tokens, self.in_turn) if self.is_on else None

    def agree(self, inputs: Iterable[Any], chosen: str, exchanged: str, stored: bool = False) -> bool:
        """See that all devices are given the same.

        Args:
            inputs: of the graph, parameters among them.
            chosen: how the step runs on this device.
            exchanged: of that, what all have to do alike.
            stored: memory of parameters need not be there.

        Returns:
            True if all have chosen the same.

        Raises:
            InputError: they are not.
        """
        if not self.is_on:
            return True
        tensors = [v for v in inputs if isinstance(v, Tensor)]
        data = [v for v in tensors if not isinstance(v, torch.nn.Parameter)]
        weights = [v for v in tensors if isinstance(v, torch.nn.Parameter)]
        weights = [] if stored or self._weights_agree else weights
        device = tensors[0].device if tensors else torch.device("cpu")
        shapes = hash(tuple(tuple(v.shape) for v in tensors)) % 2**53
        draws = Draws(tuple(tensors)) if self.random else None
        states = [] if draws is None else [draws.host, *draws.devices[1]]
        words = exchanged, chosen
        numbers = torch.tensor(
            [
                shapes,
                *(_digest(v) for v in (data, weights, states)),
                *(zlib.crc32(w.encode()) for w in words),
            ],
            dtype=torch.int64,
            device="cpu",
        )
        size = dist.get_world_size(self.group) * len(numbers)
        flat = torch.empty(size, dtype=torch.int64, device=device)
        all_gather(flat, numbers.to(device), self.group)
        *compared, choices = flat.view(-1, len(numbers)).t().tolist()
        for what, own in zip(COMPARED, compared, strict=True):
            others = [k for k, number in enumerate(own) if number != own[0]]
            if others:
                raise InputError(OTHERS.format(what=what, other=others[0]))
        self._weights_agree = True
        return len(set(choices)) == 1

    def prepare(self, frame: StepFrame) -> None:
        """Gradients of what the caller gives are summed: those that one instruction reads, together.

        Not of parameters that the step takes, see `StepFrame.behind`.

        NOTE [summed in time]: of what it can run, autograd runs first what was made last. So the node that
        sums gradients is made right before the instruction whose backward they come from: a layer's are
        summed and handed over before the next layer runs backwards, and no more than one layer's are held.
        """
        own, leaves = frame.step.own, {v.node for v in frame.program.gradients}
        assert own is not None
        frame.anew = lambda instruction: Anew([], _refuse, lambda _: None)
        frame.summed = frozenset() if frame.groups is None else frozenset(frame.group_of)
        outermost = unrolled(frame.program.forward)
        readers = Counter(n for i in outermost for n in {v.node for one in flat([i]) for v in one.inputs})

        def sum_before(instruction: StepInstruction, inner: StepFrame) -> None:
            if isinstance(instruction, Layers):  # each round is run, and asked, by itself
                return
            read = dict.fromkeys(v.node for one in flat([instruction]) for v in one.inputs)
            nodes = [n for n in read if n in leaves - inner.summed and _learns(inner.values[n])]
            if isinstance(instruction, Group):  # so is each instruction in it, but for what others read, too
                nodes = [n for n in nodes if readers[n] > 1]
            if nodes:
                summed = Summed.apply(own, inner.step.owned, *(inner.values[n] for n in nodes))
                inner.values.update(zip(nodes, summed, strict=True))
                inner.summed |= set(nodes)

        frame.sum_before = sum_before

    def result(self, node: Node, frame: StepFrame) -> Any:
        """A value for the caller."""
        if frame.step.own is None or node in frame.collected:
            return frame.collected.get(node, frame.value(node))
        value = frame.value(node)
        shared = node in self.by_segments and isinstance(value, Tensor) and value.requires_grad
        return CountedOnce.apply(frame.step.own, value) if shared else value


def _refuse() -> list[Any]:
    raise RuntimeError(NOT_READ)


def _learns(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()


def _digest(tensors: Sequence[Tensor]) -> int:
    """A number that differs, as good as always, where numbers in the tensors do."""
    total = 0
    for value in tensors:
        if not value.numel():
            continue
        flat = as_numbers(value.detach()).reshape(-1)
        if flat.dtype.is_floating_point:
            found = int(flat.double().sum().view(torch.int64))
        else:
            weights = torch.arange(1, flat.numel() + 1, device=flat.device) * 2654435761 % 1000003
            found = int((flat.to(torch.int64) * weights).sum())
        total = (total * 31 + found) % 2**53
    return total
