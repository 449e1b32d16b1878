"""Rows that are selected by their values: experts with `where`, `nonzero` and masks, as people write them.

And what looks alike and mixes rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from e2e_adversary import PARTLY, STREAMED, WARNED, Cases
from e2e_subject import WIDTH, Subject
from torch import Tensor, nn

CASES = Cases("selected rows")
EXPERTS, TOP = 4, 2


def parts() -> dict[str, Any]:
    return {
        "router": nn.Linear(WIDTH, EXPERTS),
        "experts": nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 11), nn.SiLU(), nn.Linear(11, WIDTH)) for _ in range(EXPERTS)
        ),
    }


def routed(m: Subject, x: Tensor, top: int = TOP) -> tuple[Tensor, Tensor, Tensor]:
    """Flat rows, the weights of their experts, and their experts."""
    flat = x.reshape(-1, WIDTH)
    weights, chosen = m.router(flat).softmax(-1).topk(top, dim=-1)
    return flat, weights, chosen


# ---- each row by itself


@CASES.block(parts=parts)
def a_mask_by_expert_and_choice(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, weights, chosen = routed(m, x)
    out = torch.zeros(flat.shape, dtype=x.dtype, device=x.device)
    mask = F.one_hot(chosen, num_classes=EXPERTS).permute(2, 1, 0)
    for e in range(EXPERTS):
        choice, row = torch.where(mask[e])
        y = m.experts[e](flat[None, row].reshape(-1, WIDTH)) * weights[row, choice, None]
        out.index_add_(0, row, y.to(x.dtype))
    return x + out.view_as(x)


@CASES.block(parts=parts)
def where_rows_come_first(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, weights, chosen = routed(m, x)
    out = torch.zeros_like(flat)
    for e in range(EXPERTS):
        row, choice = torch.where(chosen == e)
        y = m.experts[e](flat[row]) * weights[row, choice].unsqueeze(-1)
        out = out.scatter_add(0, row[:, None].expand(-1, WIDTH), y)
    return x + out.view_as(x)


@CASES.block(parts=parts)
def nonzero_of_a_vector(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, weights, chosen = routed(m, x, 1)
    out = torch.zeros_like(flat)
    for e in range(EXPERTS):
        row = (chosen[:, 0] == e).nonzero().flatten()
        out = out.index_add(0, row, m.experts[e](flat.index_select(0, row)) * weights[row])
    return x + out.view_as(x)


@CASES.block(parts=parts)
def columns_of_nonzero(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, weights, chosen = routed(m, x)
    out = torch.zeros_like(flat)
    for e in range(EXPERTS):
        where = (chosen == e).nonzero()
        row, choice = where[:, 0], where[:, 1]
        out = out.index_add(0, row, m.experts[e](flat[row]) * weights[row, choice, None])
    return x + out.view_as(x)


@CASES.block(parts=parts)
def put_by_a_mask(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, weights, chosen = routed(m, x, 1)
    out = torch.zeros_like(flat)
    for e in range(EXPERTS):
        mask = chosen[:, 0] == e
        out[mask] = m.experts[e](flat[mask]) * weights[mask]
    return x + out.view_as(x)


@CASES.block(parts=parts)
def added_by_a_mask(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, weights, chosen = routed(m, x)
    out = torch.zeros_like(flat)
    for e in range(EXPERTS):
        mask = (chosen == e).any(-1)
        out[mask] += m.experts[e](flat[mask]) * (weights * (chosen == e)).sum(-1, keepdim=True)[mask]
    return x + out.view_as(x)


@CASES.block(parts=parts)
def a_mask_of_samples_and_rows(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    gates = m.router(x).softmax(-1)
    best, out = gates.argmax(-1), x.clone()
    for e in range(EXPERTS):
        mask = best == e
        out[mask] = m.experts[e](x[mask]) * gates[mask][:, e : e + 1]
    return out


@CASES.block(parts=parts)
def one_after_the_other(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """Whether a row goes on depends on what it has become."""
    flat = x.reshape(-1, WIDTH)
    for e in range(EXPERTS):
        on = m.router(flat)[:, e] > 0
        flat = flat.index_put((on,), flat[on] + m.experts[e](flat[on]))
    return flat.view_as(x)


@CASES.block(parts=parts)
def selected_by_data(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    out, odd = x.clone(), ids % 3 == 1
    out[odd] = x[odd] + m.experts[0](x[odd]) * (1 + ids[odd] % 2).unsqueeze(-1)
    return out


@CASES.block(parts=parts)
def replaced_by_a_number(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    out = x * 1.5
    out[m.router(x)[..., 0] > 0] = 0.25
    return out


# ---- rows that depend on others


def _each(m: Subject, x: Tensor, work: Any) -> Tensor:
    """Selected rows of each expert, worked on and added."""
    flat, _, chosen = routed(m, x)
    out = torch.zeros_like(flat)
    for e in range(EXPERTS):
        row = torch.where((chosen == e).any(-1))[0]
        out = out.index_add(0, row, work(m.experts[e](flat[row]), row))
    return x + 0.1 * out.view_as(x)


WORK = {
    "less their mean": lambda y, row: y * (1 + y.mean(0, keepdim=True)),
    "softmax among them": lambda y, row: y * y.softmax(0),
    "their running sum": lambda y, row: y.cumsum(0),
    "the row before": lambda y, row: y + F.pad(y, (0, 0, 1, 0))[:-1],
    "attending to each other": lambda y, row: (y @ y.t()).softmax(-1) @ y,
    "divided by how many they are": lambda y, row: y / (y.shape[0] + 1),
    "their positions as numbers": lambda y, row: y * (1 + 0.01 * row.unsqueeze(-1)),
    "the first of them": lambda y, row: y * (torch.arange(y.shape[0]) < 3).unsqueeze(-1),
    "turned round": lambda y, row: y.flip(0),
    "their norm": lambda y, row: y / (1 + y.norm()),
}
for _name, _work in WORK.items():
    CASES.block(WARNED, parts, name=_name)(lambda m, x, ids, work=_work: _each(m, x, work))


@CASES.block(WARNED, parts)
def put_where_others_were(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, _, chosen = routed(m, x, 1)
    out = torch.zeros_like(flat)
    for e in range(EXPERTS):
        row = torch.where(chosen[:, 0] == e)[0]
        out = out.index_add(0, row.flip(0), m.experts[e](flat[row]))
    return x + out.view_as(x)


@CASES.block(WARNED, parts)
def put_twice_at_one_place(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """Which of two entries of a row stays depends on the order in which they are put."""
    flat, weights, chosen = routed(m, x)
    row, choice = torch.where(chosen >= 0)
    out = torch.zeros_like(flat)
    out[row] = m.experts[0](flat[row]) * weights[row, choice, None]
    return x + out.view_as(x)


@CASES.block(WARNED, parts)
def a_row_whose_number_is_a_value(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    number = int(ids.max())
    return x + m.lin(x) * m.table[number]


@CASES.block(WARNED, parts)
def how_many_beside_all_rows(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """How many there are is no size that a part behind knows."""
    at = (ids[0] == ids[0, 0]).nonzero()[:, 0]
    return x + m.lin(x) * len(at) + x[:, at].mean(1, keepdim=True)


@CASES.block(WARNED, parts)
def kept_for_later(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    at = (ids[0] == ids[0, 0]).nonzero()[:, 0]
    kept = m.lin(x[:, at])
    x = x + m.attend(m.norm(x))
    return x + kept.mean(1, keepdim=True)


@CASES.block(WARNED, parts)
def a_table_of_those_that_there_are(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    known, place = torch.unique(ids, return_inverse=True)
    return x + m.embed(known)[place]


@CASES.block(WARNED, parts)
def selected_by_the_row_before(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    mask = F.pad(m.router(x)[:, :-1, 0] > 0, (1, 0))
    out = x.clone()
    out[mask] = x[mask] + m.experts[0](x[mask])
    return out


# ---- one value for all places of a mask


def factors() -> dict[str, Any]:
    torch.manual_seed(5)
    return {"one": nn.Parameter(torch.tensor(0.7)), "row": nn.Parameter(torch.randn(WIDTH))}


def assigned(y: Tensor, mask: Tensor, value: Any) -> Tensor:
    y[mask] = value
    return y


@CASES.block()
def scores_assigned_by_a_mask(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    scores = m.scores(x)
    scores[:, :, torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)] = -torch.inf
    return x + m.weighted(x, scores.softmax(-1))


@CASES.block(parts=factors)
def rows_assigned_by_a_mask(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    y = assigned(m.lin(x), x.sum(-1) > 0.2, m.row)
    return x + assigned(y, x[..., 0] < 0, 0.0) + assigned(m.lin2(x), ids % 3 == 0, m.row[None])


@CASES.block(parts=factors)
def entries_assigned_by_a_mask(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    y = assigned(m.lin(x), x < 0, m.one)
    y[..., torch.arange(WIDTH) % 3 == 0] = m.one
    y[x[..., 0] > 0, 2] = 1.5
    return x + y


@CASES.block(WARNED, factors)
def assigned_by_a_mask_of_all_rows(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + assigned(m.lin(x), x > x.mean(1, keepdim=True), m.one)


@CASES.block(WARNED, factors)
def assigned_by_the_row_behind(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + assigned(m.lin(x), F.pad(x[:, 1:, 0] > 0, (0, 1)), m.row)


@CASES.loss(f"{STREAMED}|{PARTLY}", parts)
def a_loss_of_selected_rows(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    mask = ids[:, 1:] % 3 != 0
    return F.cross_entropy(m.head(x)[:, :-1][mask], ids[:, 1:][mask])
