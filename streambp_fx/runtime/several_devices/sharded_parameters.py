"""Parameters of which each device stores a piece, as a step takes them and gives them back.

NOTE [parameters in pieces]: an engine (FSDP2, say) keeps a piece of each parameter on each device. Around the
forward of a layer it gathers the layer's parameters, and lets them go again; in the backward it gathers them
once more, and sums their gradients over the devices. It does so in hooks of modules. A captured graph has no
modules, so a step calls what the hooks call, where its program says so (`passes.s6_schedule.sharding`). When
and how often something is gathered or reduced stays the engine's affair; so does every setting of it.

The graph is given full-size parameters, whose memory is there only between taking and giving back. Their
gradients come from autograd, one for each parameter and backward, and the engine finds them as always.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ...passes.graph.facts import Facts
from ...passes.several_devices import SeveralDevices, SharedGroup
from .parameter_groups import ParameterGroup, ShardedParameters

CHANGED = (
    "parameters of {name} have been changed between the forward and the backward of a step (by an "
    "optimizer?), and the backward would read the new ones."
)
GIVEN_BACK = (
    "these logits are computed when they are read, from parameters that lie in pieces on several devices "
    'again. Read them before the backward, or keep them: logits="keep".'
)


class GraphGroups:
    """The groups whose parameters a graph reads.

    Args:
        sharded: of the model.
        inputs: with which the graph was captured.

    Attributes:
        positions: of the parameters of each group that the schedule takes, among the inputs of the graph.
    """

    def __init__(self, sharded: ShardedParameters, inputs: Sequence[Any]) -> None:
        self._sharded, found = sharded, sharded.positions(inputs)
        self.read = {k: sharded.groups[k] for k in found}
        taken = [k for k, group in self.read.items() if not group.of_caller]
        self.positions = [found[k] for k in taken]
        self.taken = [sharded.groups[k] for k in taken]
        # Groups that nobody gathers in the backward.
        self.forward_only = frozenset(k for k, g in enumerate(self.taken) if not g.in_backward)
        self._all = found
        # Bytes of the gradients as they are summed, by position of the parameter.
        self._reduced = {k: self.read[g].reduced_bytes(inputs[k]) for g in found for k in found[g]}
        self._group_of: dict[Node, int] = {}

    def devices(self, inputs: Sequence[Any]) -> dict[int, int]:
        """By `id` of a parameter, how many devices store a piece of it."""
        return {id(inputs[k]): self.read[g].devices for g, places in self._all.items() for k in places}

    def nodes(self, facts: Facts) -> tuple[tuple[Node, ...], ...]:
        """The groups as nodes of a graph."""
        given = [n for n in facts.nodes if n.op == "placeholder"]
        self._group_of = {given[k]: group for group, places in self._all.items() for k in places}
        return tuple(tuple(given[k] for k in places) for places in self.positions)

    def several(self, facts: Facts) -> SeveralDevices:
        """What the engine does with the groups of a graph."""
        given = [n for n in facts.nodes if n.op == "placeholder"]
        around = [k for k, group in self.read.items() if group.of_caller]
        numbers = [*(k for k, group in self.read.items() if not group.of_caller), *around]
        groups = tuple(
            SharedGroup(
                name=self.read[k].name,
                devices=self.read[k].devices,
                stays=self.read[k].stays,
                ahead=self.read[k].ahead,
                gathered_bytes=self.read[k].gathered_bytes(),
                reduced_bytes={given[p]: self._reduced[p] for p in self._all[k] if self._reduced[p]},
                replicas=self.read[k].replicas,
            )
            for k in numbers
        )
        of_caller = (tuple(given[place] for place in self._all[k]) for k in around)
        return SeveralDevices(groups, tuple(of_caller), self._sharded.buckets)

    def in_step(self, forward_only: Collection[int]) -> StepGroups | None:
        """For one step whose backward does without some groups; None if what runs is no step."""
        return None if self._sharded._resting else StepGroups(self.taken, forward_only, self._sharded.failed)

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """See `ShardedParameters`."""
        with self._sharded.resting():
            yield

    def after(self, step: StepGroups | None, read: Collection[Node] | None) -> StoredAfterStep | None:
        """For an output of a step that is computed when it is read; None if all parameters are there.

        Args:
            read: nodes that it is computed from; None: all of them.
        """
        if step is None:
            return None
        nodes = self._group_of if read is None else [n for n in read if n in self._group_of]
        return StoredAfterStep([self.read[k] for k in sorted({self._group_of[n] for n in nodes})], step)

    def with_stand_ins(self, inputs: Sequence[Any]) -> list[Any]:
        """Inputs of the graph whose memory need not be there are replaced by numbers like theirs.

        NOTE [checked without the others]: a kind of step may be new on one device alone (padding, another
        dtype), which checks it alone: nothing may be gathered. So it checks it with normal numbers that have
        the mean and the deviation of the piece that it stores. Parameters that are alike share their memory:
        there are as many numbers as in a layer, and what a step computes does not depend on it.
        """
        found, made = list(inputs), {}
        for group, places in zip(self.taken, self.positions, strict=True):
            for position in places:
                parameter = inputs[position]
                mean, deviation = _statistics(group.piece(parameter))
                key = tuple(parameter.shape), parameter.dtype, round(mean, 1)
                if key not in made:
                    made[key] = _drawn(parameter, mean, deviation)
                own = made[key].detach().requires_grad_(parameter.requires_grad)
                found[position] = torch.nn.Parameter(own, parameter.requires_grad)
        return found


class StoredAfterStep:
    """What an output reads that is computed after the forward.

    NOTE [read on all devices]: before the backward somebody makes a loss of it, on all devices; then it is
    gathered. Later it may be a metric of one device, and a gather would wait for the others in vain.

    Args:
        groups: that it reads.
        step: whose output it is.
    """

    def __init__(self, groups: Sequence[ParameterGroup], step: StepGroups) -> None:
        self._groups, self._step = groups, step

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Within: all parameters are there.

        Raises:
            RuntimeError: they are not, and the backward of the step has run.
        """
        with contextlib.ExitStack() as stack:
            for group in self._groups:
                if not group.is_there and self._step.has_run_backward:
                    raise RuntimeError(GIVEN_BACK)
                stack.enter_context(group.gathered())
            yield

    def version(self) -> Hashable:
        """Another one when what is stored has been changed."""
        return tuple(group.version() for group in self._groups)


class StepGroups:
    """The groups in one step: what of their backward is still to come.

    Args:
        groups: by number.
        forward_only: those that the backward does not read.
        failed: see `ShardedParameters`.

    NOTE [the last to read]: the gradients of a group are complete when all who read it in the forward have
    run their backward. Each puts a node behind its inputs in autograd's graph, which runs when its own
    backward has run, and the last of them says so. Who has no input with a gradient cannot; then nobody says
    so, and the engine finds out at the end of the backward.
    """

    def __init__(
        self,
        groups: Sequence[ParameterGroup],
        forward_only: Collection[int] = (),
        failed: Callable[[bool], None] = lambda gradients: None,
    ) -> None:
        self.groups, self._forward_only, self._failed = groups, forward_only, failed
        self._to_come: Counter[int] = Counter()
        self._ends = self.has_run_backward = False
        self._versions: dict[int, Hashable] = {}
        self._untold: set[int] = set()
        self._to_take: deque[int] = deque()
        self._last_read: Sequence[int] = ()

    def will_take(self, numbers: Iterable[int]) -> None:
        """What the forward takes, in order. The next one is gathered while what reads the last one runs."""
        self._to_take.extend(numbers)
        self._begin()

    def hold(self, numbers: Iterable[int]) -> None:
        """Gather groups that anybody may read, also in the backward, until its end."""
        for number in sorted(numbers):
            self._untold.add(number)
            self.take(number)

    def take(self, number: int) -> None:
        """Gather a group in the forward."""
        if self._to_take and self._to_take[0] == number:
            self._to_take.popleft()
        self.groups[number].take()
        self._begin()
        self._versions.setdefault(number, self.groups[number].version())

    def _begin(self) -> None:
        if self._to_take:
            self.groups[self._to_take[0]].begin(backward=False)

    def give_back(self, number: int) -> None:
        """Nobody reads a group any more in the forward."""
        self.groups[number].give_back()

    def behind(self, read: Sequence[int], inputs: Sequence[Any]) -> list[Any]:
        """The inputs of somebody who reads groups, with a node behind those that have a gradient."""
        found = list(inputs)
        places = [k for k, v in enumerate(found) if _is_made(v)]
        if not read or not torch.is_grad_enabled():
            return found
        if not places:
            self._untold.update(read)
            return found
        self._to_come.update(read)
        made = _Behind.apply(lambda: self._has_run(read), *(found[k] for k in places))
        for k, value in zip(places, made, strict=True):
            found[k] = value
        return found

    def before(self, read: Sequence[int], outputs: Iterable[Any]) -> None:
        """The outputs of somebody who reads groups: before its backward they are gathered."""
        nodes = _nodes(outputs) if read else []
        following = self._last_read
        for node in nodes:
            node.register_prehook(lambda _: self._before_backward(read, following))
        self._last_read = read if nodes else following

    def returned(self, results: Iterable[Any]) -> None:
        """What a step returns: with its gradients the backward begins."""
        for node in _nodes(results):
            node.register_prehook(lambda _: self._begins())

    def again(self) -> StepGroups:
        """For instructions of the forward that are run again in the backward: autograd has its nodes."""
        return _Again(self.groups, self._forward_only, self._failed)

    def _begins(self) -> None:
        if not self._ends:
            self._ends = True
            torch.autograd.Variable._execution_engine.queue_callback(_AtTheEnd(self._end, self._fails))

    def _before_backward(self, read: Sequence[int], following: Sequence[int]) -> None:
        """
        Args:
            read: what is read now.
            following: what is read by the one whose backward comes next.
        """
        self._begins()
        for number in read:
            group = self.groups[number]
            if group.version() != self._versions.get(number, group.version()):
                raise RuntimeError(CHANGED.format(name=group.name))
            group.before_backward(number not in self._forward_only)
        for number in following:
            if number not in self._forward_only:
                self.groups[number].begin(backward=True)

    def _end(self) -> None:
        self._ends, self.has_run_backward = False, True
        for group in self.groups:
            group.end_of_backward()

    def _fails(self) -> None:
        self._ends, self.has_run_backward = False, True
        self._failed(True)

    def _has_run(self, read: Sequence[int]) -> None:
        self._to_come.subtract(read)
        for number in reversed(read):
            if self._to_come[number] <= 0 and number not in self._untold:
                self.groups[number].after_backward()


class _Again(StepGroups):
    """The groups while a part of the forward is run again."""

    def behind(self, read: Sequence[int], inputs: Sequence[Any]) -> list[Any]:
        """The inputs, as they are."""
        return list(inputs)

    def before(self, read: Sequence[int], outputs: Iterable[Any]) -> None:
        """Nothing."""


class _Behind(torch.autograd.Function):
    """Its inputs, and in the backward a call when their gradients have come."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return inputs

    @staticmethod
    @torch._disable_dynamo
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple:
        ctx.call()
        return (None, *gradients)


class _AtTheEnd:
    """What autograd calls at the end of a backward; something else is called if an error has ended it.

    Autograd does not call what was queued for the end of a backward that fails. It lets go of it, before the
    error comes to who has called the backward.
    """

    def __init__(self, call: Callable[[], None], fails: Callable[[], None]) -> None:
        self._call, self._fails = call, fails
        self._ended = False

    def __call__(self) -> None:
        self._call()
        self._ended = True

    def __del__(self) -> None:
        if not self._ended:
            self._fails()


def _nodes(outputs: Iterable[Any]) -> list[Any]:
    """Nodes of autograd's graph that have made something."""
    made = [v.grad_fn for v in outputs if isinstance(v, Tensor) and v.grad_fn is not None]
    return list({id(node): node for node in made}.values())


def _is_made(value: Any) -> bool:
    """True for what a gradient goes through, and not for a parameter."""
    return isinstance(value, Tensor) and value.requires_grad and not value.is_leaf


def _statistics(piece: Tensor) -> tuple[float, float]:
    """Mean and standard deviation; those of a usual weight where there are no numbers."""
    if not piece.numel():
        return 0.0, 0.02
    values = piece.detach().double()
    return float(values.mean()), float(values.std(correction=0))


def _drawn(parameter: Tensor, mean: float, deviation: float) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = tuple(parameter.shape)
    numbers = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") * deviation + mean
    return numbers.to(parameter.device, parameter.dtype)
