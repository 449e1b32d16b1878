"""Procedures of one of several devices: what is exchanged, and that broken ones are rejected."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from golden import check_golden
from test_procedures import causal, of_all_rows, programs

from streambp_fx.passes.step.checker import UnsoundProcedure, check
from streambp_fx.passes.step.instructions import AllGather, Instruction, ReduceScatter
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
