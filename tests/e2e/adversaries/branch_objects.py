"""Branches on data that show which object a variable names, or multiply zero with what is infinite.

None of them is captured: a branch that is not taken leaves its variables as the objects that they were.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from e2e_adversary import REFUSED, WARNED, WHATEVER, Cases
from e2e_subject import WIDTH, Subject
from torch import Tensor, nn

from . import data_branches
from .data_branches import EXPERTS, NEVER_CHOSEN
from .row_selections import routed

CASES = Cases("objects behind branches")
# With `torch.compile` the graph may end at the question, and what is behind it be streamed.
NOT_TAKEN = {"compile": WHATEVER, "transform": f"{WARNED}|{REFUSED}"}


class Rows(nn.Module):
    """A table of which `rows[index]` is what its tensor gives."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def __getitem__(self, index: Any) -> Tensor:
        return self.rows[index]


def parts() -> dict[str, Any]:
    return {**data_branches.parts(), "rows": Rows(), "other": nn.Linear(WIDTH, WIDTH)}


# ---- second names


@CASES.block(NOT_TAKEN, parts)
def another_name_within_the_body(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, _, chosen = routed(m, x)
    last = flat * 0.5
    out, mask = last.clone(), (chosen == 1).any(-1)
    if mask.any():
        out[mask] += m.experts[1](flat[mask])
        last = out
    out += 1
    return x + last.view_as(x)


@CASES.block(NOT_TAKEN, parts)
def a_view_within_the_body(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, _, chosen = routed(m, x)
    last = flat * 0.5
    out, mask = last.clone(), (chosen == 1).any(-1)
    if mask.any():
        out[mask] += m.experts[1](flat[mask])
        last = out.view(-1, WIDTH)
    out += 1
    return x + last.view_as(x)


@CASES.block(NOT_TAKEN, parts)
def the_same_by_another_name(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, _, chosen = routed(m, x)
    last = flat * 0.5
    out, mask = last.clone(), (chosen == 1).any(-1)
    same = out
    if mask.any():
        out[mask] += m.experts[1](flat[mask])
        last = same.view(-1, WIDTH)
    return x + last.view_as(x)


@CASES.block(NOT_TAKEN, parts)
def what_the_body_takes_is_changed_later(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, _, chosen = routed(m, x)
    other, last, mask = flat * 2, flat * 0.5, (chosen == 1).any(-1)
    if mask.any():
        last = other.view(-1, WIDTH).index_put((mask,), m.experts[1](flat[mask]))
        last = other.view(-1, WIDTH)
    other += 1
    return x + last.view_as(x)


def _rebound(m: Subject, x: Tensor, ids: Tensor, told: Callable[[Tensor, Tensor], bool]) -> Tensor:
    flat = x.reshape(-1, WIDTH) * 1
    made, mask = flat, ids.reshape(-1) > 1000
    if mask.any():
        made = made.index_put((mask,), m.lonely(flat[mask]))
    return x + made.view_as(x) * (3 if told(made, flat) else 1)


@CASES.block(NOT_TAKEN, parts)
def another_name_within_a_region(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        made, mask = x * 1, ids > 1000
        before = made
        if mask.any():
            made = made.index_put((mask,), m.lonely(x[mask]))
    return x + made * (3 if before is made else 1)


class _Kept:
    """Keeps what is added to it."""

    def __add__(self, other: Tensor) -> Tensor:
        self.other = other
        return other * 2


@CASES.block(NOT_TAKEN, parts)
def an_object_that_keeps_what_it_is_given(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    kept, mask = _Kept(), ids > 1000
    made = x * 1
    twice = kept + made
    if mask.any():
        made = made.index_put((mask,), m.lonely(x[mask]))
    return twice + made * (3 if kept.other is made else 1)


@CASES.block(NOT_TAKEN, parts)
def a_name_that_a_pattern_gives(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    mask = ids > 1000
    match x:
        case made:
            pass
    if mask.any():
        made = made.index_put((mask,), m.lonely(x[mask]))
    return x + made * (3 if made is x else 1)


@CASES.block(NOT_TAKEN, parts)
def a_method_that_returns_its_object(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    made, mask = x.contiguous(), ids > 1000
    if mask.any():
        made = made.index_put((mask,), m.lonely(x[mask]))
    return x + made * (3 if made is x else 1)


@CASES.block(NOT_TAKEN, parts)
def a_function_that_returns_its_object(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    made, mask = torch.as_tensor(x), ids > 1000
    if mask.any():
        made = made.index_put((mask,), m.lonely(x[mask]))
    return x + made * (3 if made is x else 1)


@CASES.block(NOT_TAKEN, parts)
def what_is_returned_before_the_end(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    kept: list[Tensor] = []
    found = _ended(m, x, ids > 1000, kept)
    return x + found * (3 if kept[0] is found else 1)


def _ended(m: Subject, x: Tensor, mask: Tensor, kept: list[Tensor]) -> Tensor:
    made = x * 1
    try:
        return made
    finally:
        if mask.any():
            made = made.index_put((mask,), m.lonely(x[mask]))
        kept.append(made)


def _fails(rows: Tensor) -> Tensor:
    raise ValueError("no rows")


@CASES.block(NOT_TAKEN, parts)
def an_error_that_is_caught(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    made, mask = x * 1, ids > 1000
    try:
        if mask.any():
            made = made.index_put((mask,), _fails(x[mask]))
        made = made * 2
    except ValueError:
        pass
    return x + made


def _asserted(m: Subject, rows: Tensor) -> Tensor:
    assert rows.shape[0] > 0
    return m.lonely(rows)


@CASES.block(NOT_TAKEN, parts)
def an_assertion_about_the_rows(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """It holds where the body is run, and not behind it."""
    flat, out = x.reshape(-1, WIDTH), x.reshape(-1, WIDTH).clone()
    (row,) = torch.where(ids.reshape(-1) > 1000)
    if row.numel() > 0:
        out.index_add_(0, row, _asserted(m, flat[row]))
    return out.view_as(x) * (1 if row.numel() > 0 else 3)


@CASES.block(NOT_TAKEN, parts)
def a_name_that_the_next_question_reads(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, out = x.reshape(-1, WIDTH), x.reshape(-1, WIDTH).clone()
    mask = ids.reshape(-1) > 4
    for _ in range(2):
        if mask.any():
            rows = flat[mask]
            out[mask] += m.lonely(rows)
            mask = ids.reshape(-1) > 1000
    return out.view_as(x)


@CASES.block(NOT_TAKEN, parts)
def is_it_the_same_to_an_operator(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return _rebound(m, x, ids, operator.is_)


@CASES.block(NOT_TAKEN, parts)
def is_it_the_same_to_a_function(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return _rebound(m, x, ids, lambda made, flat: id(made) == id(flat))


def _is_marked(made: Tensor, flat: Tensor) -> bool:
    flat.mark = True  # type: ignore[attr-defined]
    return hasattr(made, "mark")


@CASES.block(NOT_TAKEN, parts)
def has_it_the_mark(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return _rebound(m, x, ids, _is_marked)


@CASES.block(NOT_TAKEN, parts)
def has_it_a_gradient(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """What only the body gives a gradient."""
    made, mask = torch.zeros_like(x), ids > 1000
    if mask.any():
        made = made.index_put((mask,), m.lonely(x[mask]))
    return x * (3 if made.requires_grad else 1) + made


@CASES.block(NOT_TAKEN, parts)
def is_it_a_parameter(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    table, mask = m.rows.rows, ids > 1000
    if mask.any():
        table = table.index_put((mask.nonzero()[:, 0],), m.lonely(x[mask]))
    return x * (3 if isinstance(table, nn.Parameter) else 1) + table.sum(0)


def _let_go(value: Tensor) -> Tensor:
    return value.detach_()


def _counted(m: Subject, rows: Tensor) -> Tensor:
    m.seen.add_(1)
    return m.lonely(rows)


@CASES.block(NOT_TAKEN, parts)
def the_body_counts_elsewhere(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    out, mask = x.clone(), ids > 1000
    if mask.any():
        out[mask] = _counted(m, x[mask])
    return out * (1 + m.seen)


@CASES.block(NOT_TAKEN, parts)
def the_body_lets_go_of_a_value(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    out, own, mask = x.clone(), m.other(x), ids > 1000
    if mask.any():
        out[mask] = _let_go(own)[mask]
    return out + own


@CASES.block(NOT_TAKEN, parts)
def an_iterator_that_an_object_holds(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, _, chosen = routed(m, x)
    out, held = torch.zeros_like(flat), SimpleNamespace(numbers=iter(range(1, 9)))
    for e in range(EXPERTS):
        mask = (chosen == e).any(-1)
        if mask.any():
            out[mask] += m.experts[e](flat[mask]) * next(held.numbers)
    return x + out.view_as(x)


@CASES.block(NOT_TAKEN, parts)
def an_iterator_that_is_captured(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """The code that Dynamo makes of its rest has no hash."""
    numbers = iter(range(1, 9))
    return _scaled(m, x, lambda: next(numbers))


def _scaled(m: Subject, x: Tensor, number: Callable[[], int]) -> Tensor:
    flat, _, chosen = routed(m, x)
    out = torch.zeros_like(flat)
    for e in range(EXPERTS):
        mask = (chosen == e).any(-1)
        if mask.any():
            out[mask] += m.experts[e](flat[mask]) * number()
    return x + out.view_as(x)


# ---- entries that are hit


@CASES.block(NOT_TAKEN, parts)
def a_function_that_knows_the_hit(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, _, chosen = routed(m, x)
    out, e = torch.zeros_like(flat), 0
    own = lambda rows: m.experts[int(e)](rows)  # noqa: E731
    for e in F.one_hot(chosen, EXPERTS).sum((0, 1)).nonzero():
        row, _ = torch.where(chosen == e)
        out.index_add_(0, row, own(flat[row]))
    return x + out.view_as(x)


@CASES.block({"transform": f"{WARNED}|{REFUSED}"}, parts)
def a_generator_that_knows_the_hit(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """With `torch.compile` Dynamo itself, with any backend, reads the value from before the loop."""
    flat, _, chosen = routed(m, x)
    out, e = torch.zeros_like(flat), 0
    scales = (1 + int(e) for _ in range(EXPERTS))
    for e in F.one_hot(chosen, EXPERTS).sum((0, 1)).nonzero():
        row, _ = torch.where(chosen == e)
        out.index_add_(0, row, m.experts[0](flat[row]) * next(scales))
    return x + out.view_as(x)


@CASES.block(NOT_TAKEN, parts)
def a_comparison_that_is_inverted(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, _, chosen = routed(m, x)
    out = torch.zeros_like(flat)
    for e in F.one_hot(chosen, EXPERTS).sum((0, 1)).nonzero():
        row, _ = torch.where(chosen == e)
        out.index_add_(0, row, m.experts[e](flat[row]) * ~(e == 3))
    return x + out.view_as(x)


@CASES.block(NOT_TAKEN, parts)
def an_entry_that_is_a_view(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, _, chosen = routed(m, x)
    out, table = torch.zeros_like(flat), m.rows.rows * 1
    for e in F.one_hot(chosen, EXPERTS).sum((0, 1)).nonzero().flatten():
        row, _ = torch.where(chosen == e)
        scale = table[e]
        scale += 2
        out.index_add_(0, row, m.experts[e](flat[row]) * scale.clone())
    return x + out.view_as(x) * table.sum(0)


@CASES.block(NOT_TAKEN, parts)
def a_container_that_takes_tensors(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, _, chosen = routed(m, x)
    out = torch.zeros_like(flat)
    for e in F.one_hot(chosen, EXPERTS).sum((0, 1)).nonzero():
        row, _ = torch.where(chosen == e)
        out.index_add_(0, row, m.experts[e](flat[row]) * m.rows[e].sum(0))
    return x + out.view_as(x)


@CASES.block(NOT_TAKEN, parts)
def a_function_assigns_the_hits(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return _of_hits(m, x, routed(m, x)[2].unique().unsqueeze(1))


def _of_hits(m: Subject, x: Tensor, hits: Tensor) -> Tensor:
    def count() -> int:
        hits = (x > 0).nonzero()
        return hits.shape[1]

    flat, _, chosen = routed(m, x)
    out = torch.zeros_like(flat)
    for e in hits:
        row, _ = torch.where(chosen == e)
        out.index_add_(0, row, m.experts[e](flat[row]) * count())
    return x + out.view_as(x)


# ---- zero times infinity


@CASES.block(NOT_TAKEN, parts)
def rows_that_see_nothing(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """NaN, which nobody reads."""
    place = torch.arange(x.shape[1])
    sees = (place[:, None] >= place) & (ids != ids[:, :1])[:, None]
    scores = (m.other(x) @ m.lonely(x).transpose(1, 2)).masked_fill(~sees, float("-inf"))
    seen, mask, out = scores.softmax(-1) @ x, ids > 1000, torch.zeros_like(x)
    if mask.any():
        out[mask] = seen[mask]
    return x + out


@CASES.block(NOT_TAKEN, parts)
def shares_of_nothing(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    mask, out = ids > 1000, torch.zeros_like(x)
    weights = m.router(x).sigmoid() * mask[..., None]
    share = weights / weights.sum(-1, keepdim=True)
    if mask.any():
        out[mask] += m.lonely(x[mask]) * share[mask][:, :1]
    return x + out


@CASES.block(NOT_TAKEN, parts)
def a_router_of_selected_rows(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """No expert has rows where none are selected, and what the router reads is infinite."""
    flat, special = x.reshape(-1, WIDTH), ids.reshape(-1) > 1000
    large = (flat * 1e5).exp()
    rows, out = large[special], torch.zeros_like(flat)
    made = torch.zeros_like(rows)
    chosen = m.router(rows).topk(2, dim=-1)[1]
    for e in range(EXPERTS):
        row, _ = torch.where(chosen == e)
        if row.numel() > 0:
            made.index_add_(0, row, m.experts[e](rows[row]))
    out[special] = made
    return x + out.view_as(x)


@CASES.block(NOT_TAKEN, parts)
def a_power_that_overflows(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    mask, out, large = ids > 1000, torch.zeros_like(x), (m.other(x) * 1e5).exp()
    if mask.any():
        out[mask] = large[mask]
    return x + out


@CASES.block(NOT_TAKEN, parts)
def from_one_body_to_another(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """The first is run, and what it makes is read by the second alone."""
    flat, some, none = x.reshape(-1, WIDTH), ids.reshape(-1) > 4, ids.reshape(-1) > 1000
    large, out = torch.zeros_like(flat), torch.zeros_like(flat)
    if some.any():
        large = large.index_put((some,), (flat[some] * 1e6).exp())
    if none.any():
        out = out.index_put((none,), large[none])
    return x + out.view_as(x)


@CASES.block(NOT_TAKEN, parts)
def a_division_by_the_number_of_rows(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, out = x.reshape(-1, WIDTH), x.reshape(-1, WIDTH).clone()
    (row,) = torch.where(ids.reshape(-1) > 1000)
    if row.numel() > 0:
        out.index_add_(0, row, m.lonely(flat[row]) * (7 // row.shape[0]))
    return out.view_as(x)


@CASES.block(NOT_TAKEN, parts)
def a_product_in_the_body(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, _, chosen = routed(m, x)
    large = ((torch.arange(EXPERTS) == NEVER_CHOSEN) * 1000.0).to(x.dtype).exp()
    out = torch.zeros_like(flat)
    for e in range(EXPERTS):
        mask = (chosen == e).any(-1)
        if mask.any():
            scale = large[e] * (m.other.bias + 1)
            out[mask] += m.experts[e](flat[mask]) * scale.tanh()
    return x + out.view_as(x)
