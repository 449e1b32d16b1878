"""Procedures that call programs otherwise than these were traced, or hand over something else."""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import pytest
from test_procedures import causal, head, of_all_rows, procedures, programs

from streambp_fx.passes.step import checker, text
from streambp_fx.passes.step.checker import UnsoundProcedure, check
from streambp_fx.passes.step.instructions import (
    Allocate,
    Buffer,
    BufferKind,
    Chunks,
    Free,
    Instruction,
    Normalize,
    Over,
    Overwrite,
    Round,
    Run,
    Scale,
)
from streambp_fx.passes.step.procedure import Procedure
from streambp_fx.passes.step.row_chunks import ChunkSize
from streambp_fx.passes.step.saving import ATTENTION
from streambp_fx.passes.step.way import Way

Edit = Callable[[Procedure], Procedure]


def rewritten(body: tuple[Instruction, ...], change: Callable[[Any], Any]) -> Iterator[Any]:
    """Instructions, those within loops first; None: as it is."""
    for own in body:
        if isinstance(own, Chunks):
            own = replace(own, body=tuple(rewritten(own.body, change)))
        found = change(own)
        yield from [own] if found is None else found if isinstance(found, list) else [found]


def put(is_it: type | Callable[[Any], bool], **kwargs: object) -> Edit:
    """All such instructions have other attributes, which may be made of them."""

    def change(i: Instruction) -> Instruction | None:
        if not (isinstance(i, is_it) if isinstance(is_it, type) else is_it(i)):
            return None
        return replace(i, **{k: v(i) if callable(v) else v for k, v in kwargs.items()})  # type: ignore[arg-type]

    return lambda p: replace(p, body=tuple(rewritten(p.body, change)))


def runs(name: str, **kwargs: object) -> Edit:
    return put(lambda i: isinstance(i, Run) and i.program == name, **kwargs)


def first(*added: Callable[[Procedure], Instruction]) -> Edit:
    return lambda p: replace(p, body=(*(make(p) for make in added), *p.body))


def last(*added: Callable[[Procedure], Instruction]) -> Edit:
    return lambda p: replace(p, body=(*p.body, *(make(p) for make in added)))


def a(kind: BufferKind) -> Callable[[Procedure], Buffer]:
    """A buffer that is given, or handed over."""
    return lambda p: next(b for b in (*p.parameters, *p.results) if b.kind is kind)


def strange(p: Procedure) -> Buffer:
    """The state of another segment."""
    return Buffer(BufferKind.STATE, p.parameters[0].node)


def whole_loops_only(p: Procedure) -> Procedure:
    """A forward of all rows without the loop that fills the states: the other one writes them."""
    loops = [i for i in p.body if isinstance(i, Chunks)]
    states = next(r.writes for r in loops[0].body if isinstance(r, Run))
    return runs("forward", writes=states)(replace(p, body=tuple(i for i in p.body if i is not loops[0])))


def prices_exchanged(p: Procedure) -> Procedure:
    """What is saved of some rows is taken to be that of others."""
    return runs("joint", price=lambda i: ATTENTION if i.price is None else i.price)(p)


@dataclass(frozen=True)
class Unknown:
    buffer: Buffer


# By what is wrong: in which procedure, how it is broken, and what is said.
BROKEN: dict[str, tuple[str, Edit, str]] = {
    "inputs in another order": ("forward", runs("forward", inputs=lambda r: r.inputs[::-1]), "program reads"),
    "another program": ("forward", runs("forward", program="joint"), "no program for a forward"),
    "rows on disk": (
        "forward",
        put(lambda i: isinstance(i, Allocate) and i.buffer.kind is BufferKind.OUTPUT, place="disk"),
        "does not lie on disk",
    ),
    "gradients on disk over rows that are not": (
        "backward, overwriting",
        put(Overwrite, place="disk"),
        "does not lie on disk",
    ),
    "no such program": ("forward", runs("forward", program="nonsense"), "'nonsense' is no program"),
    "a joint that reads its own columns alone": ("backward", runs("joint", own=True), "own rows alone"),
    "states from more than their own columns": ("backward", runs("states", own=False), "own rows alone"),
    "states but those of recurrences": ("backward", runs("states", program="columns"), "no program for"),
    "a joint without its cotangent": (
        "backward",
        runs("joint", inputs=lambda r: tuple(b for b in r.inputs if b.kind is not BufferKind.COTANGENT)),
        "program reads",
    ),
    "a joint without what is kept": (
        "backward of what is kept",
        runs("joint", inputs=lambda r: tuple(b for b in r.inputs if b.kind is not BufferKind.KEPT)),
        "to be saved is neither made nor read",
    ),
    "results of the loss in another order": (
        "loss",
        runs("loss", results=lambda r: r.results[::-1]),
        "program returns",
    ),
    "sums in another order": ("backward", runs("joint", adds=lambda r: r.adds[::-1]), "program adds to"),
    "rows that are left out hold anything": (
        "forward, padded",
        put(Allocate, zero=False),
        "not run hold anything",
    ),
    "states of all rows as they come": ("forward of all rows", whole_loops_only, "program writes"),
    "a loss that is not normalized": (
        "loss in float16",
        lambda p: replace(p, body=tuple(i for i in p.body if not isinstance(i, Normalize))),
        "is not normalized",
    ),
    "a loss that is normalized without need": (
        "loss",
        first(lambda p: Normalize(a(BufferKind.COTANGENT)(p))),
        "nobody multiplies by",
    ),
    "a gradient over a weight": (
        "backward, overwriting",
        lambda p: put(Overwrite, old=a(BufferKind.CONSTANT)(p))(p),
        "may not be overwritten",
    ),
    "a gradient over rows that others read": (
        "backward, overwriting",
        lambda p: put(Overwrite, old=a(BufferKind.ROWS)(p))(p),
        "may not be overwritten",
    ),
    "a gradient of a backward is scaled": (
        "backward",
        last(lambda p: Scale(a(BufferKind.GRADIENT)(p))),
        "not known",
    ),
    "a loss is rounded before it is scaled": (
        "loss",
        last(lambda p: Round(a(BufferKind.SUM)(p))),
        "before it is multiplied",
    ),
    "a sum is rounded before it is scaled": (
        "scaling",
        lambda p: replace(p, body=p.body[::-1]),
        "before it is multiplied",
    ),
    "an empty loop": ("forward", last(lambda p: Chunks(())), "nothing is done in it"),
    "chunks of other rows, of a layer": ("backward", put(Chunks, size=ChunkSize.LOSS), "by loss_chunk"),
    "chunks of other rows, of a head": ("loss", put(Chunks, size=ChunkSize.LAYER), "by chunk"),
    "rows that count, of a backward": ("backward", put(Chunks, over=Over.COUNTED), "not the rows"),
    "all rows, of a loss": ("loss", put(Chunks, over=Over.RUN), "not the rows"),
    "something else is saved of the same rows": ("backward in pieces", prices_exchanged, "something else is"),
    "rows of which two things are saved": (
        "forward in pieces",
        lambda p: replace(p, body=tuple(in_halves(p))),
        "not the same for all",
    ),
    "another segment's state": (
        "forward",
        lambda p: last(lambda p: Allocate(strange(p)), lambda p: Free(strange(p)))(p),
        "no buffer of the segment",
    ),
    "an unknown instruction": ("forward", last(lambda p: Unknown(p.parameters[0])), "no instruction Unknown"),
    "something that is no buffer": ("forward", put(Free, buffer=None), "NoneType"),
}


def in_halves(p: Procedure) -> Iterator[Instruction]:
    """The first loop in two."""
    loops = [i for i in p.body if isinstance(i, Chunks)]
    begin, stop = loops[0].share
    middle = (begin + stop) / Fraction(2)
    for i in p.body:
        yield from (replace(i, share=s) for s in ((begin, middle), (middle, stop))) if i is loops[0] else (i,)  # type: ignore[type-var]


@pytest.mark.parametrize("what", BROKEN)
def test_it_is_rejected_and_named(what: str) -> None:
    name, change, words = BROKEN[what]
    found = procedures()[name]
    broken = change(found)
    assert broken != found
    with pytest.raises(UnsoundProcedure) as error:
        check(broken)
    assert error.value.instruction is not None and "at `" in str(error.value)
    assert words in str(error.value)


INTERFACES: dict[str, tuple[str, Edit, str]] = {
    "results in another order": ("backward", lambda p: replace(p, results=p.results[::-1]), "hands over"),
    "a result less": ("backward", lambda p: replace(p, results=p.results[:-1]), "hands over"),
    "parameters in another order": (
        "forward",
        lambda p: replace(p, parameters=p.parameters[::-1]),
        "is given",
    ),
    "rows of several devices": ("forward", lambda p: replace(p, several=True), "several devices"),
    "rows for a neighbour": ("forward", lambda p: replace(p, passing=p.results), "with its neighbours"),
    "another name": ("forward", lambda p: replace(p, name="again"), "is given"),
    "no such name": ("forward", lambda p: replace(p, name="nonsense"), "is not known"),
    "nothing is known of the programs": ("forward", lambda p: replace(p, signature=None), "is not known"),
    "another segment's programs": (
        "forward",
        lambda p: replace(p, signature=head().signature(Way())),
        "is given",
    ),
    "a causal forward for all rows": (
        "forward",
        lambda p: replace(p, signature=programs(causal, 1).signature(Way(full=True))),
        "program writes",
    ),
    "a forward of all rows for causal ones": (
        "forward of all rows",
        lambda p: replace(p, signature=programs(of_all_rows, 1).signature(Way())),
        "program writes",
    ),
}


@pytest.mark.parametrize("what", INTERFACES)
def test_a_procedure_is_that_of_its_segment(what: str) -> None:
    name, change, words = INTERFACES[what]
    with pytest.raises(UnsoundProcedure, match=words):
        check(change(procedures()[name]))


def test_a_padded_backward_that_writes_over_something_has_zeros() -> None:
    layer = programs(causal, 1)
    over = frozenset({Buffer(BufferKind.COTANGENT, layer.diff_outputs[0])})
    found = layer.procedure("backward", Way(left_out=True, overwrites=over))
    check(found)
    with pytest.raises(UnsoundProcedure, match="not run hold anything"):
        check(put(Overwrite, zero=False)(found))


def test_every_instruction_is_in_all_tables() -> None:
    kinds = set(typing.get_args(Instruction))
    assert kinds == set(checker.CHECKS) == set(text.LINES)
