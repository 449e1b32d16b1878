"""Procedures of one of several devices: what is exchanged, and that broken ones are rejected."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from golden import check_golden
from test_procedures import causal, of_all_rows, programs

from streambp_fx.passes.step.checker import UnsoundProcedure, check
from streambp_fx.passes.step.instructions import (
    AllGather,
    Allocate,
    Buffer,
    BufferKind,
    Chunks,
    Instruction,
    ReduceScatter,
    Run,
)
from streambp_fx.passes.step.procedure import Procedure
from streambp_fx.passes.step.text import text
from streambp_fx.passes.step.way import Way

SEVERAL = {"of a layer": causal, "of all rows": of_all_rows}


def procedure(body: str, name: str) -> Procedure:
    return programs(SEVERAL[body], 1).procedure(name, Way(full=body == "of all rows", several=True))


@pytest.mark.parametrize("body", SEVERAL)
@pytest.mark.parametrize("name", ["forward", "backward"])
def test_text_of_procedures(body: str, name: str) -> None:
    check_golden(text(procedure(body, name)), __file__, f"{name}_{body.replace(' ', '_')}")


def by_blocks(name: str) -> Procedure:
    """Each device holds the states of its own rows; those of others come while a chunk runs."""
    return programs(causal, 1).procedure(name, Way(several=True, by_blocks=True))


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_text_by_blocks(name: str) -> None:
    check_golden(text(by_blocks(name)), __file__, f"{name}_by_blocks")


def _changed(instruction: Instruction, kind: type, **others: object) -> Instruction:
    """With another attribute, if it is of a kind; in a loop, what is of the kind."""
    if isinstance(instruction, Chunks):
        return dataclasses.replace(
            instruction, body=tuple(_changed(i, kind, **others) for i in instruction.body)
        )
    of_state = getattr(getattr(instruction, "buffer", None), "kind", None) is BufferKind.STATE
    changes = isinstance(instruction, kind) and (kind is Run or of_state)
    return dataclasses.replace(instruction, **others) if changes else instruction  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["forward", "backward"])
@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda body: [_changed(i, Run, by_blocks=False) for i in body], "that other devices have"),
        (lambda body: [_changed(i, Run, by_blocks=True) for i in body], "block by block"),
        (lambda body: [_changed(i, Allocate, own=False) for i in body], "rows of this device alone"),
        (lambda body: _gathered(body), "no room for the rows of others"),
    ],
)
def test_broken_procedures_by_blocks_are_rejected(
    name: str, edit: Callable[[list[Instruction]], list[Instruction]], words: str
) -> None:
    found = by_blocks(name)
    with pytest.raises(UnsoundProcedure, match=words):
        check(dataclasses.replace(found, body=tuple(edit(list(found.body)))))


def _gathered(body: list[Instruction]) -> list[Instruction]:
    place = next(k for k, i in enumerate(body) if isinstance(i, Chunks)) + 1
    return [*body[:place], AllGather(_state(body)), *body[place:]]


def _state(body: list[Instruction]) -> Buffer:
    return next(i.buffer for i in body if isinstance(i, Allocate) and i.buffer.kind is BufferKind.STATE)


def _dropped(body: list[Instruction], place: int) -> list[Instruction]:
    return body[:place] + body[place + 1 :]


def _doubled(body: list[Instruction], place: int) -> list[Instruction]:
    return body[: place + 1] + body[place:]


def _first(body: list[Instruction], place: int) -> list[Instruction]:
    return [body[place], *_dropped(body, place)]


def _last(body: list[Instruction], place: int) -> list[Instruction]:
    return [*_dropped(body, place), body[place]]


def _otherwise(body: list[Instruction], place: int) -> list[Instruction]:
    """What the device itself has added is summed where it is not to be, and the other way round."""
    one = body[place]
    assert isinstance(one, ReduceScatter)
    return [*body[:place], dataclasses.replace(one, others=not one.others), *body[place + 1 :]]


@pytest.mark.parametrize("body", SEVERAL)
@pytest.mark.parametrize(
    ("name", "kind"), [("forward", AllGather), ("backward", AllGather), ("backward", ReduceScatter)]
)
@pytest.mark.parametrize("edit", [_dropped, _doubled, _first, _last, _otherwise])
def test_broken_procedures_are_rejected(
    body: str, name: str, kind: type, edit: Callable[[list[Instruction], int], list[Instruction]]
) -> None:
    if edit is _otherwise and kind is AllGather:
        pytest.skip("there is nothing to be otherwise")
    found = procedure(body, name)
    own = list(found.body)
    place = next(k for k, i in enumerate(own) if isinstance(i, kind))
    with pytest.raises(UnsoundProcedure):
        check(dataclasses.replace(found, body=tuple(edit(own, place))))
