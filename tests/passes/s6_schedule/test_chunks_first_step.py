"""One loop over chunks for several segments: broken ones are rejected."""

from __future__ import annotations

from dataclasses import replace

import pytest
from golden import check_golden
from test_step_program import parts

from streambp_fx.passes.s3_cut.policy import Policy
from streambp_fx.passes.s6_schedule.build import schedule
from streambp_fx.passes.s6_schedule.checker import UnsoundStep, check_step
from streambp_fx.passes.s6_schedule.program import ChunksFirst, StepProgram
from streambp_fx.passes.s6_schedule.program.one_loop import OF_CHUNK, HandOn, OneLoop
from streambp_fx.passes.s6_schedule.program.values import ValueKind
from streambp_fx.passes.s6_schedule.transforms import transformed
from streambp_fx.passes.step.checker import UnsoundProcedure, check
from streambp_fx.passes.step.instructions import Chunks, Free, Hand, Roll
from streambp_fx.passes.step.procedure import Procedure
from streambp_fx.passes.step.text import line


def step() -> StepProgram:
    own = parts(Policy(order="chunks"), count=3)
    return transformed(schedule(own), own)


def loops(program: StepProgram) -> tuple[ChunksFirst, ChunksFirst]:
    """Of the forward and of the backward."""
    (forward,), (backward,) = (
        [i for i in body if isinstance(i, ChunksFirst)] for body in (program.forward, program.backward)
    )
    return forward, backward


def with_loop(program: StepProgram, old: ChunksFirst, new: ChunksFirst) -> StepProgram:
    forward, backward = ([new if i is old else i for i in b] for b in (program.forward, program.backward))
    return program.with_parts(forward, backward)


def test_what_is_kept_are_states() -> None:
    forward, backward = loops(step())
    assert {v.kind for v in forward.results} == {ValueKind.STATE, ValueKind.CAPTURED}
    assert [c.segment for c in backward.again] == [c.segment for c in forward.body]
    assert [c.segment for c in backward.body] == [c.segment for c in forward.body][::-1]
    states = [v for v in forward.results if v.kind is ValueKind.STATE]
    assert states and set(states) <= set(backward.inputs)


def lines(loop: OneLoop) -> str:
    """The instructions of a loop over several segments."""
    parts = {"before": loop.before, "for each chunk": loop.body, "after": loop.after}
    found = []
    for title, body in parts.items():
        found += [f"{title}{', in reverse' if body is loop.body and loop.reverse else ''}:"]
        for own in body:
            one, what = own.instruction, ""
            if isinstance(one, HandOn):
                what = f"hand {one.buffer.name} on to segment {one.segment} as {one.taken.name}"
            what = what or line(one)
            found.append(f"    {own.call.procedure_name} of segment {own.call.segment}: {what}")
    return "\n".join(found)


@pytest.mark.parametrize("frozen", [False, True])
def test_all_of_it_as_one_loop(frozen: bool) -> None:
    own = parts(Policy(order="chunks"), count=3)
    forward, backward = loops(transformed(schedule(own), own))
    if frozen:  # nothing that is trained comes before the last layer
        backward = replace(backward, body=backward.body[:2])
    text = f"{lines(forward.loop)}\n\n{lines(backward.loop)}"
    check_golden(text, __file__, "one_loop_of_which_some_is_frozen" if frozen else "one_loop")
    of_chunk = [b for c in backward.loop.calls for b in c.procedure.passing if b.kind in OF_CHUNK]
    free = (own for own in backward.loop.body if isinstance(own.instruction, Free))
    freed = [(own.call.segment, own.instruction.buffer) for own in free]
    assert of_chunk and len(set(freed)) == len(freed)


BROKEN = {
    "a segment is left out forwards": lambda f, b: (f, replace(f, body=f.body[:1] + f.body[2:])),
    "two segments change places": lambda f, b: (f, replace(f, body=(f.body[1], f.body[0], *f.body[2:]))),
    "a segment is not run again": lambda f, b: (b, replace(b, again=b.again[:1] + b.again[2:])),
    "nothing is run again": lambda f, b: (b, replace(b, again=())),
    "a segment is not differentiated": lambda f, b: (b, replace(b, body=b.body[:1] + b.body[2:])),
    "backwards in the forward's order": lambda f, b: (b, replace(b, body=b.body[::-1])),
    "a state does not come in": lambda f, b: (
        b,
        replace(b, inputs=tuple(v for v in b.inputs if v.kind is not ValueKind.STATE)),
    ),
    "a state is not kept": lambda f, b: (f, replace(f, results=f.results[1:])),
    "a gradient is forgotten": lambda f, b: (b, replace(b, results=b.results[:-1])),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_loops_are_rejected(what: str) -> None:
    program = step()
    old, new = BROKEN[what](*loops(program))
    with pytest.raises(UnsoundStep):
        check_step(with_loop(program, old, new))


def without(procedure: Procedure, kind: type) -> Procedure:
    body = tuple(
        replace(i, body=tuple(j for j in i.body if not isinstance(j, kind))) if isinstance(i, Chunks) else i
        for i in procedure.body
    )
    return replace(procedure, body=body)


def test_broken_procedures_are_rejected() -> None:
    """Rows that are not handed on, or to nobody; a state that is written as if for the first time."""
    forward, backward = loops(step())
    first, again, last = forward.body[0].procedure, backward.again[1].procedure, backward.body[0].procedure
    for procedure in (first, again, last):
        with pytest.raises(UnsoundProcedure, match="made and not used"):
            check(without(procedure, Hand))
        with pytest.raises(UnsoundProcedure, match="with its neighbours"):
            check(replace(procedure, passing=()))
    (loop,) = (i for i in again.body if isinstance(i, Chunks))
    run = replace(loop.body[0], rewrites=(), writes=loop.body[0].rewrites)  # type: ignore[call-arg]
    with pytest.raises(UnsoundProcedure, match="written twice"):
        check(replace(again, body=(replace(loop, body=(run, *loop.body[1:])),)))


def test_columns_are_let_go_backwards_only() -> None:
    backward = loops(step())[1].body[1].procedure
    place = next(k for k, i in enumerate(backward.body) if isinstance(i, Chunks))
    gradient = next(
        i.buffer for i in backward.body if hasattr(i, "buffer") and i.buffer.name.startswith("grad_s")
    )
    loop = replace(backward.body[place], reverse=False, body=(Roll(gradient), *backward.body[place].body))
    with pytest.raises(UnsoundProcedure, match="may be left that are read later"):
        check(replace(backward, body=(*backward.body[:place], loop, *backward.body[place + 1 :])))
