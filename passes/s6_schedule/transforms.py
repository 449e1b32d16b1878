"""Functions from step program to step program: what the memory policy, padding and liveness make of it.

The order is that of `STEP_PASSES`. Each keeps the step's results and gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch.fx import Node

from ..graph.facts import Segment
from ..pipeline.runner import Pass, run_passes
from ..s3_cut.policy import groups
from ..step.instructions import Buffer, BufferKind
from .checker import check_step
from .chunks_first import run_chunks_first
from .kept_states import keep_states
from .offloading import move_what_is_kept
from .own_rows import share_rows
from .program import (
    Again,
    Call,
    CallLoss,
    Drop,
    Group,
    Layers,
    RunPart,
    StepInstruction,
    StepProgram,
    flat,
    form_of,
    read_from_outside,
    segment_of,
)
from .program.values import Value
from .repeats import repeats
from .rows_elsewhere import move_rows
from .sharding import reduce_gradients, take_parameters
from .step_parts import StepParts
from .text import step_text

Transform = Callable[[StepProgram, StepParts], StepProgram]


def leave_out_rows(program: StepProgram) -> StepProgram:
    """Of some samples not all rows are run, see NOTE [samples that have ended]: what is not run is zero."""

    def changed(instruction: StepInstruction) -> StepInstruction:
        if isinstance(instruction, Call):
            return replace(instruction, way=replace(instruction.way, left_out=True))
        return instruction.with_bodies(lambda body: map(changed, body))

    return program.with_parts(map(changed, program.forward), map(changed, program.backward))


def keep_inputs_of_groups(program: StepProgram, parts: StepParts) -> StepProgram:
    """Segments that keep their inputs together, see `s3_cut.policy.groups`, are run again before their
    backward.
    """
    if not program.backward:
        return program
    forward, backward = list(program.forward), list(program.backward)
    returned = set(program.returned)
    kept = {v.node for v in returned}
    found = [own for group in groups(parts.facts, parts.policy) for own in _cut_behind(group, kept)]
    for group in (g for g in found if len(g) > 1):
        indices = {s.index for s in group}
        places = [k for k, i in enumerate(forward) if segment_of(i) in indices]
        body = tuple(forward[k] for k in places)
        if any(isinstance(i, CallLoss) for i in body):
            continue
        made = _group(body, group, parts, forward[places[-1] + 1 :])
        # what the model returns is still there: nobody makes it again
        made = replace(made, again=tuple(i for i in made.again if not returned.issuperset(i.results)))
        if not made.again or any(v in returned for i in made.again for v in i.results):
            continue
        forward[places[0] : places[-1] + 1] = [made]
        first = next((k for k, i in enumerate(backward) if segment_of(i) in indices), None)
        if first is not None:
            results = tuple(v for i in made.again for v in i.results)
            again = Again(
                body=made.again,
                segment=group[-1].index,
                inputs=read_from_outside(made.again),
                results=results,
            )
            backward.insert(first, again)
    return program.with_parts(forward, backward)


def _cut_behind(group: list[Segment], kept: set[Node | None]) -> Iterator[list[Segment]]:
    """A group in parts that end with what is kept anyway: what follows is made of that."""
    part: list[Segment] = []
    for segment in group:
        part.append(segment)
        if not kept.isdisjoint(segment.outputs):
            yield part
            part = []
    if part:
        yield part


def _group(
    body: tuple[StepInstruction, ...],
    group: list[Segment],
    parts: StepParts,
    rest: Sequence[StepInstruction],
) -> Group:
    body = tuple(_recorded(body, group))
    later = {v for i in rest for v in i.inputs}
    results = tuple(v for i in body for v in i.results if v in later)
    # nobody reads the last outputs again, and what they were made of is kept
    again = body if parts.policy.saves(group[-1]) else body[:-1]
    return Group(body=body, again=again, inputs=read_from_outside(body), results=results)


def _recorded(body: tuple[StepInstruction, ...], group: list[Segment]) -> Iterator[StepInstruction]:
    """A part with rows behind it that run in chunks is recorded before their backward; its own follows."""
    before_rows = {a.index for a, b in itertools.pairwise(group) if b.is_behind}
    for instruction in body:
        recorded = isinstance(instruction, RunPart) and instruction.segment in before_rows
        yield replace(instruction, recorded=True) if recorded else instruction  # type: ignore[call-arg]


def overwrite_rows_of_loss(program: StepProgram, parts: StepParts) -> StepProgram:
    """The gradient of a loss head's rows is written over them where nobody else reads them later.

    Only of segments that are run by chunks, which write into memory of their own: what another returns may
    be a view of what it keeps.
    """
    position = next((k for k, i in enumerate(program.forward) if isinstance(i, CallLoss)), None)
    if position is None or parts.facts.segments[-1].removed:
        return program
    loss, forward = program.forward[position], list(program.forward)
    assert isinstance(loss, CallLoss)
    calls = (i for i in flat(program.forward[:position]) if isinstance(i, Call))
    segments = parts.facts.segments
    own = (i for i in calls if not segments[i.segment].chained)
    fresh = {v for i in own for v in i.results}
    others = {v for i in (*program.forward[position + 1 :], *program.backward) for v in i.inputs}
    rows = loss.procedure.parameters
    taken = {
        buffer
        for buffer, value in zip(rows, loss.inputs, strict=False)
        if buffer.kind is BufferKind.ROWS and value in fresh and value not in others
        if Buffer(BufferKind.GRADIENT, buffer.node) in loss.procedure.results
    }
    way = replace(loss.way, overwrites=frozenset(taken))
    forward[position] = replace(loss, way=way)
    return program.with_parts(forward, program.backward)


def drop_what_nobody_reads(program: StepProgram) -> StepProgram:
    """Each value is let go after the last instruction that reads it."""
    ours = {*program.given, *program.returned}
    live: set[Value] = set()
    backward = _dropped(program.backward, live, ours)
    forward = _dropped(program.forward, live, ours)
    prologue = _dropped(program.prologue, live, ours)
    return replace(program, prologue=prologue, forward=forward, backward=backward)


def _dropped(
    body: Sequence[StepInstruction], live: set[Value], ours: set[Value]
) -> tuple[StepInstruction, ...]:
    """The instructions with drops; `live` is what is read after them, and becomes what is read by them."""
    found: list[StepInstruction] = []
    for instruction in reversed(body):
        inner = isinstance(instruction, Again)  # whose results are dropped within
        met = dict.fromkeys((*instruction.inputs, *(() if inner else instruction.results)))
        gone = {*live, *ours, *instruction.consumed}
        dead = tuple(v for v in met if v not in gone)
        found += [Drop(inputs=dead)] if dead else []
        if isinstance(instruction, Group | Again):
            after = set(live) if inner else set(instruction.results)
            within = _dropped(instruction.body, after, {*ours, *live, *instruction.inputs})
            instruction = replace(instruction, body=within)
        live -= set(instruction.results)
        live |= set(instruction.inputs)
        found.append(instruction)
    return tuple(reversed(found))


def fold_layers(program: StepProgram) -> StepProgram:
    """Instructions that come again and again, on the values of one layer after the other, become a loop."""
    return program.with_parts(_folded(program.forward), _folded(program.backward))


def _folded(body: tuple[StepInstruction, ...]) -> Iterator[StepInstruction]:
    for repeat in repeats([form_of(i) for i in body]):
        own = body[repeat.start : repeat.stop]
        if repeat.times == 1 or not any(isinstance(i, Call | RunPart) for i in own):
            yield from own
            continue
        starts = range(0, len(own), repeat.period)
        yield Layers(rounds=tuple(own[k : k + repeat.period] for k in starts))


@dataclass(frozen=True)
class Scheduling:
    """A step that is being made.

    Attributes:
        program: so far.
        dropped: values are dropped when nobody reads them any more.
    """

    program: StepProgram
    dropped: bool = False
    title: str = "step"

    def __str__(self) -> str:
        return step_text(self.program)


@dataclass(frozen=True)
class StepSettings:
    """How a step is made.

    Attributes:
        parts: what it is made of.
        left_out: some rows of some samples are not run.
        several: each of several devices runs its own rows.
        kept_states: segments that keep the states of recurrences, see `kept_states`.
        by_blocks: segments whose chunks read columns of other devices block by block.
    """

    parts: StepParts
    left_out: bool = False
    several: bool = False
    kept_states: frozenset[int] = frozenset()
    by_blocks: frozenset[int] = frozenset()


def _by_policy(transform: Transform) -> Callable[[Scheduling, StepSettings], Scheduling]:
    return lambda made, settings: replace(made, program=transform(made.program, settings.parts))


def _is_shared(parts: StepParts) -> bool:
    return bool(parts.facts.parameter_groups) or parts.facts.several is not None


StepPass = Pass[Scheduling, StepSettings]
#: The passes over a step, in the order in which they run.
STEP_PASSES: tuple[StepPass, ...] = (
    Pass(
        "keep_inputs_of_groups",
        "segments that keep their inputs together are run again before their backward",
        _by_policy(keep_inputs_of_groups),
        gives=("what runs again",),
        applies=lambda settings: (
            bool(settings.parts.facts.segments) and settings.parts.policy.order == "layers"
        ),
    ),
    Pass(
        "run_chunks_first",
        "each chunk goes through neighbouring layers before the next chunk does",
        _by_policy(run_chunks_first),
        gives=("loops",),
        applies=lambda settings: settings.parts.runs_chunks_first and not settings.several,
    ),
    Pass(
        "keep_states",
        "the states of recurrences that are small are kept, and not made again in the backward",
        lambda made, settings: replace(
            made, program=keep_states(made.program, settings.parts, settings.kept_states)
        ),
        needs=("what runs again", "loops"),
        gives=("what is kept",),
        applies=lambda settings: bool(settings.kept_states),
    ),
    Pass(
        "overwrite_rows_of_loss",
        "the gradient of a loss head's rows is written over them",
        _by_policy(overwrite_rows_of_loss),
        needs=("what is kept",),
        optional=True,
    ),
    Pass(
        "move_rows",
        "rows between layers, and their gradients, lie elsewhere and come to the device chunk by chunk",
        _by_policy(move_rows),
        needs=("what is kept",),
        applies=lambda settings: settings.parts.moves_rows and not settings.several,
    ),
    Pass(
        "move_what_is_kept",
        "what the backward reads of the forward leaves the device and comes back",
        _by_policy(move_what_is_kept),
        needs=("what is kept",),
        applies=lambda settings: settings.parts.moves,
    ),
    Pass(
        "leave_out_rows",
        "of samples that have ended the rest is not run",
        lambda made, _: replace(made, program=leave_out_rows(made.program)),
        needs=("loops",),
        applies=lambda settings: settings.left_out,
    ),
    Pass(
        "share_rows",
        "each device runs its own rows, and what others read of them is exchanged",
        lambda made, settings: replace(
            made, program=share_rows(made.program, settings.parts, settings.by_blocks)
        ),
        needs=("what runs again",),
        gives=("shares",),
        applies=lambda settings: settings.several,
    ),
    Pass(
        "take_parameters",
        "parameters that several devices store are gathered before they are read, and given back",
        _by_policy(take_parameters),
        needs=("what runs again", "loops"),
        applies=lambda settings: _is_shared(settings.parts),
    ),
    Pass(
        "reduce_gradients",
        "gradients are summed over several devices when those of a group or of a bucket are complete",
        _by_policy(reduce_gradients),
        needs=("shares",),
        gives=("gradients",),
        applies=lambda settings: _is_shared(settings.parts),
    ),
    Pass(
        "drop_what_nobody_reads",
        "each value is let go after the last instruction that reads it",
        lambda made, _: Scheduling(drop_what_nobody_reads(made.program), dropped=True),
        needs=("what is kept", "gradients"),
        gives=("drops",),
    ),
    Pass(
        "fold_layers",
        "what is done to one layer after the other becomes a loop",
        lambda made, _: replace(made, program=fold_layers(made.program)),
        needs=("drops",),
        optional=True,
    ),
)


def transformed(
    program: StepProgram,
    parts: StepParts,
    left_out: bool = False,
    several: bool = False,
    kept_states: frozenset[int] = frozenset(),
    by_blocks: frozenset[int] = frozenset(),
) -> StepProgram:
    """The step as it runs: memory policy, rows left out, each value dropped in time, loops over layers.

    What comes out is always checked; with STREAMBP_CHECK=1 what each pass makes is.

    Raises:
        PassError: a pass failed.
        UnsoundStep: what was made is wrong.
    """

    def verify(one: StepPass, made: Scheduling) -> None:
        check_step(made.program, made.dropped)

    settings = StepSettings(parts, left_out, several, kept_states, by_blocks)
    made = run_passes(STEP_PASSES, Scheduling(program), settings, verify)
    check_step(made.program)
    return made.program
