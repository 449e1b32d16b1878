"""Parameters in pieces: where a step takes them and gives them back, and that broken steps are rejected."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest
from golden import check_golden
from test_step_program import facts, parts

from streambp_fx.passes.graph.facts import Facts
from streambp_fx.passes.s3_cut.policy import Policy
from streambp_fx.passes.s6_schedule.build import schedule
from streambp_fx.passes.s6_schedule.checker import UnsoundStep, check_step
from streambp_fx.passes.s6_schedule.collectives import Collective, CollectiveKind, collectives_of
from streambp_fx.passes.s6_schedule.program import (
    GiveBackParameters,
    ReduceGradients,
    StepInstruction,
    StepProgram,
    TakeParameters,
    flat,
    unrolled,
)
from streambp_fx.passes.s6_schedule.sharding import bytes_of
from streambp_fx.passes.s6_schedule.step_parts import Making, StepParts
from streambp_fx.passes.s6_schedule.text import step_text
from streambp_fx.passes.s6_schedule.transforms import transformed
from streambp_fx.passes.several_devices import Buckets, SeveralDevices, SharedGroup


def sharded(policy: Policy | None = None, forward_only: bool = False, **kwargs: bool | int) -> StepParts:
    """Each layer's parameters are a group, those of the embedding and of the head too."""
    plain = parts(policy, **kwargs)
    own: Facts = dataclasses.replace(plain.facts)
    table, *others = [n for n in own.nodes if n in own.parameters]
    pairs = [tuple(others[k : k + 2]) for k in range(0, len(others), 2)]  # of a layer; the last is the head's
    own.parameter_groups = ((table,), *pairs)
    own.not_again_groups = frozenset({0} if forward_only else ())
    making = Making("eager", policy or Policy(), "float32", bool(kwargs.get("logits")))
    return StepParts(own, making, {})


def with_engine(stays: bool = False, buckets: bool = False) -> StepParts:
    """The embedding and the head are gathered around the call of the model; or gradients are in buckets."""
    plain = sharded(count=3)
    own = plain.facts
    groups = own.parameter_groups
    if buckets:
        sizes = [bytes_of(n) for group in groups for n in group]
        limit = max(sizes)
        own.parameter_groups, own.several = (), SeveralDevices(buckets=Buckets(2, (limit, 2 * limit)))
    else:
        around = (*groups[0], *groups[-1])
        named = {f"layer {k}": group for k, group in enumerate(groups[1:-1])} | {"the rest": around}
        shared = tuple(
            SharedGroup(
                name=name,
                devices=2,
                stays=stays or name == "the rest",
                ahead=True,
                gathered_bytes=sum(map(bytes_of, nodes)),
                reduced_bytes={n: bytes_of(n) for n in nodes},
            )
            for name, nodes in named.items()
        )
        own.parameter_groups, own.several = groups[1:-1], SeveralDevices(shared, (around,))
    return StepParts(own, Making("eager", Policy(), "float32", False), {})


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


@pytest.mark.parametrize("every", [1, 2])
def test_the_order_is_that_of_the_graph(every: int) -> None:
    """What is kept or moved, what the data says of masks, and rows that are left out change nothing about it.

    So devices whose batches and options differ in these call the same collectives in the same order.
    """
    orders = set()
    for policy in (Policy(every=every), Policy("attention", every), Policy(offload="disk", every=every)):
        own = sharded(policy)
        layers = frozenset(s.index for s in own.facts.segments if s.mixings)
        for full, left_out in itertools.product((frozenset[int](), layers), (False, True)):
            made = transformed(schedule(own, full), own, left_out)
            kinds = (TakeParameters, GiveBackParameters)
            orders.add(tuple((type(i), i.group) for i in made.instructions() if isinstance(i, kinds)))  # type: ignore[attr-defined]
    assert len(orders) == 1 and len(*orders) > 0


@pytest.mark.parametrize("name", ["around the call", "stay", "buckets"])
def test_text_with_an_engine(name: str) -> None:
    own = with_engine(stays=name == "stay", buckets=name == "buckets")
    found = transformed(schedule(own), own)
    check_golden(step_text(found, procedures=False), __file__, f"sharded_{name.replace(' ', '_')}")


def collectives(step: StepProgram) -> list[Collective]:
    return [c for i in step.instructions() for c in collectives_of(step, i)]


def test_collectives() -> None:
    """What is gathered and summed, in order, and bytes in a ring of two."""
    counts = {False: (7, 4), True: (4, 4)}
    for stays, (gathers, sums) in counts.items():
        own = with_engine(stays)
        found = collectives(transformed(schedule(own), own))
        kinds = [c.kind for c in found]
        assert (kinds.count(CollectiveKind.ALL_GATHER), kinds.count(CollectiveKind.REDUCE_SCATTER)) == (
            gathers,
            sums,
        )
        assert all(c.sent_bytes == c.bytes // 2 for c in found)
        assert found[0].of_caller and found[-1].of_caller
        layers = [int(c.name.split()[1]) for c in found if c.name.startswith("layer")]
        assert layers == [0, 1, 2] + ([2, 1, 0] if stays else [2, 2, 1, 1, 0, 0])
    own = with_engine(buckets=True)
    sizes = sum(bytes_of(n) for n in own.facts.parameters)
    found = collectives(transformed(schedule(own), own))
    assert len(found) > 2 and sum(c.bytes for c in found) == sizes
    assert all(c.sent_bytes == c.bytes for c in found), "an all-reduce is sent twice"


@pytest.mark.parametrize("what", ["dropped", "doubled", "moved to the beginning"])
@pytest.mark.parametrize("buckets", [False, True])
def test_broken_sums_are_rejected(buckets: bool, what: str) -> None:
    own = with_engine(buckets=buckets)
    step = transformed(schedule(own), own)
    body = list(unrolled(step.backward))
    place = next(k for k, i in enumerate(body) if isinstance(i, ReduceGradients))
    one, rest = body[place], body[:place] + body[place + 1 :]
    broken = {"dropped": rest, "doubled": [*body, one], "moved to the beginning": [one, *rest]}[what]
    with pytest.raises(UnsoundStep, match=r"over the devices|summed twice|handed over yet"):
        check_step(step.with_parts(step.forward, broken))


def test_what_has_stayed_is_not_gathered_again() -> None:
    own = with_engine(stays=True)
    step = transformed(schedule(own), own)
    body = list(unrolled(step.backward))
    place = next(k for k, i in enumerate(body) if isinstance(i, TakeParameters) and not i.of_caller)
    body[place] = dataclasses.replace(body[place], there=False)  # type: ignore[call-arg]
    with pytest.raises(UnsoundStep, match="they have stayed"):
        check_step(step.with_parts(step.forward, body))


def test_buckets_close_at_their_limits() -> None:
    nodes = facts().nodes[:5]
    sizes = dict(zip(nodes, (3, 4, 2, 9, 1), strict=True))
    after = Buckets(2, (3, 6)).fill(sizes)
    before = Buckets(2, (6, 6), closes_before=True).fill(sizes)
    assert [[sizes[n] for n in own] for own in after] == [[3], [4, 2], [9], [1]]
    assert [[sizes[n] for n in own] for own in before] == [[3], [4, 2], [9], [1]]
    assert [[sizes[n] for n in own] for own in Buckets(2, (4, 12)).fill(sizes)] == [[3, 4], [2, 9, 1]]


def _edited(step: StepProgram, edit: Callable[[list[StepInstruction]], list[StepInstruction]]) -> StepProgram:
    return step.with_parts(edit(list(unrolled(step.forward))), edit(list(unrolled(step.backward))))


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
