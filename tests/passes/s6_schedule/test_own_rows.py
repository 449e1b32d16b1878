"""The step of one of several devices, as a program: what is exchanged, and that broken ones are rejected."""

from __future__ import annotations

import pytest
from golden import check_golden
from test_step_program import STEPS

from streambp_fx.passes.s6_schedule.build import schedule
from streambp_fx.passes.s6_schedule.checker import UnsoundStep, check_step
from streambp_fx.passes.s6_schedule.program import (
    Call,
    CollectRows,
    HandOver,
    StepInstruction,
    SumShares,
    unrolled,
)
from streambp_fx.passes.s6_schedule.text import step_text
from streambp_fx.passes.s6_schedule.transforms import transformed


@pytest.mark.parametrize("name", ["plain", "two sweeps", "whole part", "every second"])
def test_text(name: str) -> None:
    own = STEPS[name]()
    found = transformed(schedule(own), own, several=True)
    check_golden(step_text(found, procedures=False), __file__, f"several_{name.replace(' ', '_')}")


@pytest.mark.parametrize("name", [n for n in STEPS if "chunks" not in n])
def test_each_gradient_is_summed_once(name: str) -> None:
    own = STEPS[name]()
    found = list(transformed(schedule(own), own, several=True).instructions())
    summed = [v for i in found if isinstance(i, SumShares) for v in i.inputs]
    handed_over = [v for i in found if isinstance(i, HandOver) for v in i.inputs]
    assert summed == handed_over and len(set(summed)) == len(summed) > 0
    assert all(i.way.several for i in found if isinstance(i, Call))
    collected = [v for i in found if isinstance(i, CollectRows) for v in i.inputs]
    assert bool(collected) is (name in ("whole part", "two sweeps"))


def test_a_share_that_is_not_summed_is_rejected() -> None:
    own = STEPS["plain"]()
    step = transformed(schedule(own), own, several=True)

    def without(body: tuple[StepInstruction, ...]) -> list[StepInstruction]:
        found = list(unrolled(body))
        found.remove(next((i for i in found if isinstance(i, SumShares)), found[-1]))
        return found

    with pytest.raises(UnsoundStep, match="share"):
        check_step(step.with_parts(step.forward, without(step.backward)))
