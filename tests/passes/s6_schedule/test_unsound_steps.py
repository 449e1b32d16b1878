"""Steps that read or make something else than they must: each is rejected, and its instruction is named."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from test_step_program import STEPS, program

from streambp_fx.passes.s6_schedule import checker, text
from streambp_fx.passes.s6_schedule import program as instructions
from streambp_fx.passes.s6_schedule.build import schedule
from streambp_fx.passes.s6_schedule.checker import UnsoundStep, check_step
from streambp_fx.passes.s6_schedule.program import (
    Add,
    Again,
    Call,
    CallLoss,
    ChunksFirst,
    CollectRows,
    Defer,
    Differentiate,
    Drop,
    Fetch,
    Group,
    HandOver,
    Layers,
    Leave,
    Linearize,
    Return,
    RunPart,
    Seed,
    StepInstruction,
    StepProgram,
    TakeParameters,
    Zeros,
)
from streambp_fx.passes.s6_schedule.program.values import Value, ValueKind
from streambp_fx.passes.s6_schedule.transforms import transformed
from streambp_fx.passes.step.instructions import Buffer, BufferKind
from streambp_fx.passes.step.saving import Price, everywhere

Put = StepInstruction | Iterable[StepInstruction] | None
Change = Callable[[Any], Put]
Edit = Callable[[StepProgram], StepProgram]


def rewritten(body: Iterable[StepInstruction], change: Change) -> Iterator[StepInstruction]:
    """Instructions, those within loops and groups first; None: as it is."""
    for instruction in body:
        own: Any = instruction
        if isinstance(own, Layers):
            own = replace(own, rounds=tuple(tuple(rewritten(r, change)) for r in own.rounds))
        elif isinstance(own, Group | Again):
            own = replace(own, body=tuple(rewritten(own.body, change)))
        found = change(own)
        yield from [own] if found is None else [found] if isinstance(found, StepInstruction) else found


def edited(step: StepProgram, change: Change, part: str = "") -> StepProgram:
    parts = [part] if part else ["prologue", "forward", "backward"]
    return replace(step, **{p: tuple(rewritten(getattr(step, p), change)) for p in parts})  # type: ignore[arg-type]


def once(step: StepProgram, is_it: Callable[[Any], bool], new: Change) -> StepProgram:
    """The first such instruction is another one."""
    seen: list[StepInstruction] = []

    def change(instruction: StepInstruction) -> Put:
        if seen or not is_it(instruction):
            return None
        seen.append(instruction)
        return new(instruction)

    found = edited(step, change)
    assert seen, "there is no such instruction"
    return found


def forwards(i: object) -> bool:
    return type(i) is Call and i.procedure_name == "forward"


def backwards(i: object) -> bool:
    return type(i) is Call and i.procedure_name == "backward"


def a(kind: type) -> Callable[[Any], bool]:
    return lambda i: isinstance(i, kind)


def of_kind(values: Iterable[Value], kind: ValueKind) -> list[Value]:
    return [v for v in values if v.kind is kind]


def keeps_elsewhere(i: object) -> bool:
    return forwards(i) and i.place != "device"  # type: ignore[attr-defined]


def is_segment(i: object) -> bool:
    return isinstance(i, RunPart) and i.name == "segment"


def is_added(i: object) -> bool:
    return isinstance(i, Add) and len(i.inputs) == 2


# ---- what is changed


def put(is_it: Callable[[Any], bool], **kwargs: object) -> Edit:
    """The first such instruction has other attributes, which may be made of it."""

    def new(i: StepInstruction) -> Put:
        return replace(i, **{k: v(i) if callable(v) else v for k, v in kwargs.items()})  # type: ignore[arg-type]

    return lambda step: once(step, is_it, new)


def way(is_it: Callable[[Any], bool], **kwargs: object) -> Edit:
    """The first such call is run in another way; elsewhere nothing is."""

    def new(i: Call) -> Put:
        own = {k: v(i) if callable(v) else v for k, v in kwargs.items()}
        return replace(i, way=replace(i.way, **own))  # type: ignore[arg-type]

    return lambda step: once(step, is_it, new)


def instead(is_it: Callable[[Any], bool], new: Change) -> Edit:
    """There is something else instead of the first such instruction."""
    return lambda step: once(step, is_it, new)


def swapped(values: tuple[Value, ...]) -> tuple[Value, ...]:
    """The last two, which are two weights of one shape, or their gradients."""
    return (*values[:-2], values[-1], values[-2])


def weights(call: Call) -> frozenset[Buffer]:
    return frozenset(b for b in call.procedure.parameters if b.kind is BufferKind.CONSTANT)


def gradients(i: StepInstruction) -> tuple[Value, ...]:
    return tuple(of_kind(i.inputs, ValueKind.GRADIENT))


def loss_of(step: StepProgram) -> CallLoss:
    return next(i for i in step.forward if isinstance(i, CallLoss))


def exchanged(step: StepProgram) -> StepProgram:
    """Two layers read what the other one has kept; it is dropped after whoever reads it."""
    kept = [v for i in step.calls() if backwards(i) for v in of_kind(i.inputs, ValueKind.KEPT)]
    other = {kept[0]: kept[1], kept[1]: kept[0]}

    def change(i: StepInstruction) -> Put:
        ours = backwards(i) or isinstance(i, Drop)
        return replace(i, inputs=tuple(other.get(v, v) for v in i.inputs)) if ours else None

    return edited(step, change, "backward")


def first_input_of_the_first_layer(step: StepProgram) -> StepProgram:
    """The second layer reads what the first one reads."""
    first, second = [c for c in step.calls() if forwards(c)][:2]
    wrong = replace(second, inputs=(first.inputs[0], *second.inputs[1:]))
    return edited(step, lambda i: wrong if i == second else None, "forward")


def in_two(i: StepInstruction) -> Put:
    return [Drop(inputs=(v,)) for v in i.inputs] if isinstance(i, Drop) else None


def with_one_round_changed(loop: Layers) -> Layers:
    return replace(loop, rounds=(tuple(rewritten(loop.rounds[0], in_two)), *loop.rounds[1:]))


def with_weights_exchanged(loop: ChunksFirst) -> ChunksFirst:
    one, two = loop.body[1:3]
    own = {v: w for c, d in ((one, two), (two, one)) for v, w in zip(c.inputs, d.inputs, strict=False)}
    body = [replace(c, inputs=tuple(own.get(v, v) for v in c.inputs)) for c in (one, two)]
    return replace(loop, body=(loop.body[0], *body, *loop.body[3:]))


def zeros_and_a_drop(i: Differentiate) -> Put:
    return [Zeros(results=i.results), Drop(inputs=i.inputs[:1])]


class Unknown(StepInstruction): ...


# By what is wrong: in which step, how it is broken, and what is said.
OPERANDS: dict[str, tuple[str, Edit, str]] = {
    "two gradients exchanged": (
        "plain",
        put(backwards, results=lambda i: swapped(i.results)),
        "stands where it makes",
    ),
    "two weights exchanged": ("plain", put(forwards, inputs=lambda i: swapped(i.inputs)), "stands where"),
    "another layer's input": ("plain", first_input_of_the_first_layer, "stands where"),
    "a forward of another segment": ("plain", put(forwards, segment=lambda i: i.segment + 1), "stands where"),
    "a backward of another segment": (
        "plain",
        put(backwards, segment=lambda i: i.segment - 1),
        "stands where",
    ),
    "no such segment": ("plain", put(forwards, segment=70), "there is no segment 70"),
    "programs of another segment": (
        "plain",
        lambda s: put(forwards, programs=loss_of(s).programs)(s),
        "programs are not those of segment",
    ),
    "what others have kept": ("kept attention", exchanged, "stands where the procedure has saved"),
    "a part reads nothing": ("whole part", put(is_segment, inputs=()), "reads 2 values, not 0"),
    "what is differentiated is not read": ("whole part", put(a(Differentiate), inputs=gradients), "not 1"),
    "another part is differentiated": (
        "whole part",
        lambda s: put(a(Differentiate), part=loss_of(s).part)(s),
        "not what was run",
    ),
    "the loss is derived from something": (
        "plain",
        lambda s: put(a(Linearize), inputs=s.given[:1])(s),
        "reads 0 values",
    ),
    "a loss at another position": ("plain", put(a(CallLoss), position=7), "not at position 7"),
    "a deferred output at another position": ("lazy logits", put(a(Defer), position=0), "at position 0"),
    "another order of results": (
        "lazy logits",
        put(a(Return), inputs=lambda i: i.inputs[::-1]),
        "stands where it returns",
    ),
    "a loop's segments read each other's weights": (
        "chunks first",
        instead(a(ChunksFirst), with_weights_exchanged),
        "stands where",
    ),
    "a loop reads what it does not say": (
        "chunks first",
        put(a(ChunksFirst), inputs=lambda i: i.inputs[:-1]),
        "it reads",
    ),
}
WAYS: dict[str, tuple[str, Edit, str]] = {
    "all rows are read forwards only": ("plain", way(forwards, full=True), "reads of all rows"),
    "one forward leaves rows out": ("plain", way(forwards, left_out=True), "rows that are left out"),
    "other values are saved than are read": (
        "kept attention",
        way(backwards, saves=everywhere(Price(5.0))),
        "values that are saved",
    ),
    "float16 where there is none": ("plain", way(a(CallLoss), half=True), "only there"),
    "an unknown procedure": ("plain", put(forwards, procedure_name="nonsense"), "no procedure"),
    "a backward amid the forward": ("plain", put(forwards, procedure_name="backward"), "no procedure"),
    "a weight is written over": ("plain", way(backwards, overwrites=weights), "may not be written over"),
    "rows are written over that a forward reads": (
        "plain",
        way(forwards, overwrites=lambda i: frozenset(i.procedure.parameters[:1])),
        "may not be written over",
    ),
}
GRADIENTS: dict[str, tuple[str, Edit, str]] = {
    "a part is dropped and not added": (
        "tied",
        instead(is_added, lambda i: Drop(inputs=i.inputs[-1:])),
        "nobody has read it",
    ),
    "the sum is added to itself": ("tied", put(is_added, inputs=lambda i: i.inputs[:1] * 2), "occurs twice"),
    "a sum of nothing": ("tied", put(a(Add), inputs=()), "added to what there is"),
    "zeros instead of a layer": (
        "plain",
        instead(backwards, lambda i: Zeros(results=i.results)),
        "no gradient of what a segment makes",
    ),
    "zeros instead of the loss": (
        "two sweeps",
        instead(a(Differentiate), zeros_and_a_drop),
        "is dropped, and nobody has read it",
    ),
    "no gradient of the loss": ("two sweeps", put(a(Seed), results=()), "does not come from the caller"),
    "a gradient is handed over twice": ("plain", put(a(HandOver), inputs=lambda i: i.inputs * 2), "twice"),
    "nothing is handed over": ("plain", put(a(HandOver), inputs=()), "reads something"),
    "a layer is differentiated twice": ("plain", instead(backwards, lambda i: [i, i]), "twice"),
}
GROUPS: dict[str, tuple[str, Edit, str]] = {
    "a group keeps nothing": ("every second", put(a(Group), inputs=()), "values, not 0"),
    "a group runs nothing again": ("every second", put(a(Group), again=()), "what its group has not kept"),
    "a group does not make again what it reads": (
        "every second",
        put(a(Group), again=lambda i: i.again[1:]),
        "is not made again",
    ),
    "what is run again reads nothing": ("every second", put(a(Again), inputs=()), "values, not 0"),
    "another segment's backward waits": (
        "every second",
        put(a(Again), segment=0),
        "no group ends with segment 0",
    ),
    "a group runs again in another order": (
        "every second",
        put(a(Group), again=lambda i: i.again[::-1]),
        "not what was run",
    ),
    "layers that do not do the same": (
        "every second",
        instead(a(Layers), with_one_round_changed),
        "not all layers do the same",
    ),
    "what leaves has another number": ("on disk", put(a(Leave), number=99), "as number 99"),
    "what leaves is kept by another": (
        "on disk",
        put(a(Leave), number=lambda i: i.number - 1 if i.number else 1),
        "is not what is kept as number",
    ),
    "one keeps on the device": ("on disk", put(keeps_elsewhere, place="device"), "others keep on disk"),
    "a place that there is not": ("on disk", put(forwards, place="moon"), "no place 'moon'"),
    "the backward keeps something": ("on disk", put(backwards, place="disk"), "it keeps nothing"),
    "it comes back amid the forward": (
        "on disk",
        instead(a(Leave), lambda i: [i, Fetch(inputs=i.inputs)]),
        "does not belong",
    ),
}
KINDS: dict[str, tuple[str, Edit, str]] = {
    "an unknown group": (
        "plain",
        instead(forwards, lambda i: [TakeParameters(group=99, inputs=i.inputs[:1]), i]),
        "no group 99",
    ),
    "an unknown instruction": (
        "plain",
        instead(forwards, lambda i: [Unknown(), i]),
        "no instruction Unknown",
    ),
    "something that is no value": ("plain", put(a(Drop), inputs=(None,)), "NoneType"),
}
BROKEN = {**OPERANDS, **WAYS, **GRADIENTS, **GROUPS, **KINDS}


@pytest.mark.parametrize("what", BROKEN)
def test_it_is_rejected_and_named(what: str) -> None:
    name, change, words = BROKEN[what]
    step = program(name)
    broken = change(step)
    assert broken != step
    with pytest.raises(UnsoundStep) as error:
        check_step(broken)
    assert error.value.instruction is not None and "at `" in str(error.value)
    assert words in str(error.value)


def several(name: str) -> StepProgram:
    own = STEPS[name]()
    return transformed(schedule(own), own, several=True)


ROWS: dict[str, tuple[Change, str]] = {
    "not gathered": (lambda i: (), "other devices have"),
    "of something else": (lambda i: replace(i, inputs=i.inputs * 2), "twice"),
    "summed otherwise": (lambda i: replace(i, partial=not i.partial), "are summed"),
}


@pytest.mark.parametrize("name", ["whole part", "two sweeps"])
@pytest.mark.parametrize("what", ROWS)
def test_rows_of_other_devices_are_gathered(name: str, what: str) -> None:
    change, words = ROWS[what]
    with pytest.raises(UnsoundStep, match=words):
        check_step(once(several(name), a(CollectRows), change))


def forward_alone() -> StepProgram:
    own = STEPS["plain"]()
    return transformed(schedule(own, training=False), own)


PROMISES: dict[str, tuple[Edit, str]] = {
    "gradients are given": (lambda s: replace(s, given=(*s.given, *s.gradients)), "nothing that the caller"),
    "no backward": (lambda s: replace(forward_alone(), gradients=s.gradients), "is not handed over"),
    "nothing is returned": (lambda s: replace(s, returned=()), "returns"),
    "a gradient is not promised": (lambda s: replace(s, gradients=s.gradients[1:]), "is not what the caller"),
    "a gradient too many": (
        lambda s: replace(s, gradients=(*s.gradients, Value(ValueKind.GRADIENT, s.returned[0].node))),
        "is not handed over",
    ),
}


@pytest.mark.parametrize("what", PROMISES)
def test_promises_are_those_of_the_graph(what: str) -> None:
    change, words = PROMISES[what]
    with pytest.raises(UnsoundStep, match=words):
        check_step(change(program("plain")))


def test_every_instruction_is_in_all_tables() -> None:
    exported = (getattr(instructions, name) for name in instructions.__all__)
    kinds = {k for k in exported if isinstance(k, type) and issubclass(k, StepInstruction)} - {
        StepInstruction
    }
    defined = {k for k in subclasses(StepInstruction) if k.__module__.startswith("streambp_fx.passes.")}
    assert kinds == defined == set(checker.CHECKS) == set(text.LINES) == {k for k in defined if k.places}
    assert {RunPart, Call} < kinds


def subclasses(kind: type) -> set[type]:
    return {k for own in kind.__subclasses__() for k in (own, *subclasses(own))}
