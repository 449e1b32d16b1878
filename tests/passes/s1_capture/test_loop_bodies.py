"""Bodies of scans: the first row has a step of its own, and nothing is changed by two names."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node, symbolic_trace

from streambp_fx.passes.s1_capture.loops import scans
from streambp_fx.passes.s1_capture.loops.first_row import NotApart, first_row, halves, other_rows
from streambp_fx.passes.s1_capture.loops.in_place import SharedChange, changed_to, refuse_shared

torch.fx.wrap("first_row")
torch.fx.wrap("other_rows")
torch.fx.wrap("changed_to")
Body = Callable[..., tuple[Tensor, ...]]


def traced(body: Body) -> GraphModule:
    return symbolic_trace(body)


def values(count: int) -> list[Tensor]:
    numbers = torch.randn(count, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return [x.clone() for x in numbers]


def two_steps(h: Tensor, row: Tensor, begin: Tensor) -> tuple[Tensor, Tensor]:
    first = row + begin
    made = first * 2
    row = other_rows(row)
    other = 0.5 * h + row.sqrt()
    return first_row(first, other), first_row(made, other * 3)


def test_each_row_runs_its_own_step() -> None:
    begin, h, row = values(3)
    first, other = halves(traced(two_steps))
    assert first is not None
    torch.testing.assert_close(first(h, row, begin), (row + begin, 2 * (row + begin)))
    after = 0.5 * h + row.abs().sqrt()
    torch.testing.assert_close(other(h, row.abs(), begin), (after, 3 * after))
    assert not any("sqrt" in str(n.target) for n in first.graph.nodes)


def test_a_scan_with_two_steps() -> None:
    rows, (h, begin, *_) = torch.rand(5, 3, 2, dtype=torch.float64), values(2)
    after, made = scans._row_by_row(traced(two_steps), [h], [rows], [begin])
    expected = rows[0] + begin
    results = [2 * expected]
    for row in rows[1:]:
        expected = 0.5 * expected + row.sqrt()
        results.append(3 * expected)
    torch.testing.assert_close((after, made), (expected, torch.stack(results)))


def test_a_step_that_reads_the_other() -> None:
    def body(h: Tensor, row: Tensor) -> tuple[Tensor]:
        first = row * 2
        return (first_row(first, first + other_rows(row)),)

    with pytest.raises(NotApart, match="which the other one makes"):
        halves(traced(body))


def test_the_steps_are_never_run_together() -> None:
    with pytest.raises(NotApart, match="run with that of others"):
        first_row(*values(2))


def copied(*results: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.clone(memory_format=torch.contiguous_format) for x in results)


def alone(h: Tensor, other: Tensor, row: Tensor, more: Tensor) -> tuple[Tensor, ...]:
    h = changed_to(h, h + row)
    h = changed_to(h, h * 0.5)
    return copied(h, other + h, h * 2)


def by_two_names(h: Tensor, other: Tensor, row: Tensor, more: Tensor) -> tuple[Tensor, ...]:
    h = changed_to(h, h + row)
    return copied(h, h.view(-1).view(3, 2), other)


def by_an_old_name(h: Tensor, other: Tensor, row: Tensor, more: Tensor) -> tuple[Tensor, ...]:
    old, h = h, changed_to(h, h + row)
    return copied(h, old.tanh(), other)


def changed_when_it_is_handed_on(h: Tensor, other: Tensor, row: Tensor, more: Tensor) -> tuple[Tensor, ...]:
    new = row + 1
    other = changed_to(other, other + row)
    return copied(new, h, new + other)


def to_what_is_known_for_all_rows(h: Tensor, other: Tensor, row: Tensor, more: Tensor) -> tuple[Tensor, ...]:
    return copied(more, other, changed_to(h, h + row))


def the_row(h: Tensor, other: Tensor, row: Tensor, more: Tensor) -> tuple[Tensor, ...]:
    old = row.view(3, 2)
    new = changed_to(row, row + 1)
    return copied(old, other, new)


def given() -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]:
    h, other, more = values(3)
    return [h, other], [torch.randn(4, 3, 2, dtype=torch.float64)], [more]


@pytest.mark.parametrize("body", [alone, changed_when_it_is_handed_on])
def test_changes_that_nobody_else_sees(body: Body) -> None:
    refuse_shared(traced(body), *given())


@pytest.mark.parametrize("body", [by_two_names, by_an_old_name, to_what_is_known_for_all_rows, the_row])
def test_changes_that_others_may_see(body: Body) -> None:
    with pytest.raises(SharedChange):
        refuse_shared(traced(body), *given())


@pytest.mark.parametrize("body", [alone, changed_when_it_is_handed_on])
def test_a_beginning_that_others_know(body: Body) -> None:
    (h, _), rows, rest = given()
    with pytest.raises(SharedChange, match="when it begins"):
        refuse_shared(traced(body), [h, h.view(3, 2)], rows, rest)


def test_a_change_to_another_dtype() -> None:
    h, row = values(2)
    with pytest.raises(TypeError, match="another shape or dtype"):
        changed_to(h.float(), row)


def test_marks_are_taken_out() -> None:
    begin, rows, rest = given()
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        body, _, _ = scans.understood(traced(alone), begin, rows, rest)
    nodes: list[Node] = list(body.module.graph.nodes)
    assert not any(n.target is changed_to for n in nodes)
