"""Whoever follows a program knows every instruction: a new kind that a table lacks is noticed here."""

from __future__ import annotations

from typing import get_args

from streambp_fx.cost import procedures, step_walk
from streambp_fx.passes.s6_schedule import checker
from streambp_fx.passes.s6_schedule.program.one_loop import HandOn
from streambp_fx.passes.step.instructions import Instruction
from streambp_fx.runtime import step_interpreter
from streambp_fx.runtime.segments import interpreter
from streambp_fx.show.code import step, sweeps

OF_SEGMENTS = set(get_args(Instruction))
OF_STEPS = set(checker.CHECKS)  # which has all of them, see test_unsound_steps.py
# The backward is run by autograd; these are what it does, or what the prologue is made of.
BY_AUTOGRAD = {
    "Add",
    "Again",
    "Differentiate",
    "Fetch",
    "HandOver",
    "ReduceGradients",
    "Seed",
    "SumShares",
    "Zeros",
}
# What a printed program is made without: one device has all rows, and it runs layer by layer.
NOT_PRINTED = {"ChunksFirst", "CollectRows", "SumShares"}
NOT_PRINTED_OF_SEGMENTS = {"AllGather", "Hand", "Receive", "ReduceScatter", "Roll", "Send", "ZeroRows"}


def names(kinds: object) -> set[str]:
    return {kind.__name__ for kind in kinds}  # type: ignore[attr-defined]


def test_what_is_interpreted() -> None:
    assert interpreter.EXECUTE.keys() == OF_SEGMENTS
    assert names(OF_STEPS) == names(step_interpreter.EXECUTE) | BY_AUTOGRAD | {"Linearize"}


def test_what_is_counted() -> None:
    assert procedures.COUNT.keys() | procedures.COUNT_OF_CHUNK.keys() == {*OF_SEGMENTS, HandOn}
    assert step_walk.COUNT.keys() == OF_STEPS


def test_what_is_printed_as_python() -> None:
    assert names(OF_SEGMENTS) == names(sweeps.PRINT) | NOT_PRINTED_OF_SEGMENTS
    assert names(OF_STEPS) == names(step.PRINT) | NOT_PRINTED
