"""Parameters in pieces: where a step takes them and gives them back, and that broken steps are rejected."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from golden import check_golden
from test_step_program import facts, parts

from streambp_fx.passes.graph.facts import Facts
from streambp_fx.passes.s3_cut.policy import Policy
from streambp_fx.passes.s6_schedule.build import schedule
from streambp_fx.passes.s6_schedule.checker import UnsoundStep, check_step
from streambp_fx.passes.s6_schedule.program import (
    GiveBackParameters,
    StepInstruction,
    StepProgram,
    TakeParameters,
    flat,
)
from streambp_fx.passes.s6_schedule.step_parts import Making, StepParts
from streambp_fx.passes.s6_schedule.text import step_text
from streambp_fx.passes.s6_schedule.transforms import transformed


def sharded(policy: Policy | None = None, forward_only: bool = False, **kwargs: bool | int) -> StepParts:
    """Each layer's parameters are a group, those of the embedding and of the head too."""
    plain = parts(policy, **kwargs)
    own: Facts = dataclasses.replace(plain.facts)
    table, *others = [n for n in own.nodes if n in own.parameters]
    pairs = [tuple(others[k : k + 2]) for k in range(0, len(others), 2)]  # of a layer; the last is the head's
    own.parameter_groups = ((table,), *pairs)
    own.forward_only_groups = frozenset({0} if forward_only else ())
    making = Making("eager", policy or Policy(), "float32", bool(kwargs.get("logits")))
    return StepParts(own, making, {})


def program(*args: object, **kwargs: object) -> StepProgram:
    own = sharded(*args, **kwargs)  # type: ignore[arg-type]
    return transformed(schedule(own), own)


@pytest.mark.parametrize("name", ["plain", "tied", "every second", "not in the backward", "lazy logits"])
def test_text(name: str) -> None:
    found = {
        "plain": lambda: program(),
        "tied": lambda: program(tied=True, count=2),
        "every second": lambda: program(Policy(every=2)),
        "not in the backward": lambda: program(forward_only=True, count=2),
        "lazy logits": lambda: program(logits=True, count=2),
    }[name]()
    check_golden(step_text(found, procedures=False), __file__, f"sharded_{name.replace(' ', '_')}")


def test_each_is_gathered_once_in_the_forward_and_once_in_the_backward() -> None:
    found = program(count=7)
    for part in (found.forward, found.backward):
        taken = [i.group for i in flat(part) if isinstance(i, TakeParameters)]
        given = [i.group for i in flat(part) if isinstance(i, GiveBackParameters)]
        assert sorted(taken) == sorted(given) == list(range(9))
    most, there = 0, 0
    for instruction in found.instructions():
        there += isinstance(instruction, TakeParameters) - isinstance(instruction, GiveBackParameters)
        most = max(most, there)
    assert most == 1


def test_the_order_is_that_of_the_graph() -> None:
    """What is kept or moved changes nothing about it."""
    orders = []
    for policy in (Policy(), Policy("attention"), Policy(offload="disk")):
        kinds = (TakeParameters, GiveBackParameters)
        orders.append([(type(i), i.group) for i in program(policy).instructions() if isinstance(i, kinds)])  # type: ignore[attr-defined]
    assert orders[0] == orders[1] == orders[2]


def _edited(step: StepProgram, edit: Callable[[list[StepInstruction]], list[StepInstruction]]) -> StepProgram:
    return step.with_parts(edit(list(flat(step.forward))), edit(list(flat(step.backward))))


@pytest.mark.parametrize("kind", [TakeParameters, GiveBackParameters])
@pytest.mark.parametrize("what", ["dropped", "doubled", "moved to the end", "moved to the beginning"])
def test_broken_steps_are_rejected(kind: type, what: str) -> None:
    step = program(count=3)

    def edit(body: list[StepInstruction]) -> list[StepInstruction]:
        place = next(k for k, i in enumerate(body) if isinstance(i, kind) and i.group == 1)  # type: ignore[attr-defined]
        one = body[place]
        rest = body[:place] + body[place + 1 :]
        again = body[: place + 1] + body[place:]
        return {
            "dropped": rest,
            "doubled": again,
            "moved to the end": [*rest, one],
            "moved to the beginning": [one, *rest],
        }[what]

    harmless = (kind is GiveBackParameters and what == "moved to the end") or (
        kind is TakeParameters and what == "moved to the beginning"
    )
    if harmless:  # held for longer than is needed, which is no fault
        check_step(_edited(step, edit))
        return
    with pytest.raises(UnsoundStep, match=r"gathered|given back|parameters"):
        check_step(_edited(step, edit))


def test_unsharded_steps_have_none() -> None:
    assert not facts().parameter_groups
    own = parts()
    step = transformed(schedule(own), own)
    assert not step.groups and "gather" not in step_text(step, procedures=False)
