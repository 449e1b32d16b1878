"""Branches on data: experts that run only if some row has chosen them, as people write them.

One expert is never chosen: eager leaves its gradients None. And bodies that do something else than to work on
the rows that are asked about.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from e2e_adversary import REFUSED, WARNED, WHATEVER, Cases
from e2e_subject import WIDTH, Subject
from torch import Tensor, nn

from .row_selections import routed

CASES = Cases("branches on data")
EXPERTS, NEVER_CHOSEN = 5, 2
# A body that does something beside is not captured.
NOT_TAKEN = {"compile": WARNED, "transform": f"{WARNED}|{REFUSED}"}


def parts() -> dict[str, Any]:
    router = nn.Linear(WIDTH, EXPERTS)
    with torch.no_grad():
        router.bias[NEVER_CHOSEN] = -1e4
    return {
        "router": router,
        "experts": nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 11), nn.SiLU(), nn.Linear(11, WIDTH)) for _ in range(EXPERTS)
        ),
        "noise": nn.Dropout(0.5),
        "seen": torch.zeros((), dtype=torch.float64),
        "lonely": nn.Linear(WIDTH, WIDTH),
    }


# ---- asked in many ways


@CASES.block(parts=parts)
def no_rows_go_on_with_the_next(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    batch, length, width = x.shape
    flat, weights, chosen = routed(m, x)
    out = torch.zeros((batch * length, width), dtype=x.dtype, device=x.device)
    mask = F.one_hot(chosen, num_classes=EXPERTS).permute(2, 1, 0)
    for e in range(EXPERTS):
        expert = m.experts[e]
        choice, row = torch.where(mask[e])
        if row.shape[0] == 0:
            continue
        current = flat[None, row].reshape(-1, width)
        out.index_add_(0, row, (expert(current) * weights[row, choice, None]).to(x.dtype))
    return x + out.reshape(batch, length, width)


@CASES.block(parts=parts)
def any_of_a_mask(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, weights, chosen = routed(m, x)
    out = torch.zeros_like(flat)
    for e, expert in enumerate(m.experts):
        mask = (chosen == e).any(dim=-1)
        if mask.any():
            share = (weights * (chosen == e)).sum(-1)[mask].unsqueeze(-1)
            out[mask] += expert(flat[mask]) * share
    return x + out.view_as(x)


def _with_shares(m: Subject, x: Tensor, share_of: Any) -> Tensor:
    """Experts whose shares are made before anything is asked."""
    flat, weights, chosen = routed(m, x)
    out = torch.zeros_like(flat)
    for e, expert in enumerate(m.experts):
        mask = (chosen == e).any(dim=-1)
        share = share_of(weights, chosen == e)
        if mask.any():
            out[mask] = out[mask] + expert(flat[mask]) * share[mask][:, None]
    return x + out.view_as(x)


@CASES.block(parts=parts)
def shares_before_it_is_asked(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return _with_shares(m, x, lambda weights, own: (weights * own).sum(-1))


@CASES.block(parts=parts)
def shares_of_a_mask_in_another_dtype(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return _with_shares(m, x, lambda weights, own: (weights * own.to(weights.dtype)).sum(-1))


@CASES.block(parts=parts)
def counts_as_a_list(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, weights, chosen = routed(m, x)
    out = torch.zeros_like(flat)
    counts = torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()
    for e in range(EXPERTS):
        if counts[e] == 0:
            continue
        row, choice = torch.where(chosen == e)
        out[row] += m.experts[e](flat[row]) * weights[row, choice, None]
    return x + out.view(x.shape)


@CASES.block(parts=parts)
def experts_that_are_hit(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, weights, chosen = routed(m, x)
    out = torch.zeros_like(flat)
    mask = F.one_hot(chosen, num_classes=EXPERTS).permute(2, 1, 0)
    hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
    for e in hit:
        expert = m.experts[e]
        choice, row = torch.where(mask[e].squeeze(0))
        out.index_add_(0, row, expert(flat[row]) * weights[row, choice, None])
    return x + out.view_as(x)


@CASES.block(parts=parts)
def experts_that_are_hit_as_numbers(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, weights, chosen = routed(m, x)
    out = torch.zeros_like(flat)
    hits = F.one_hot(chosen, num_classes=EXPERTS).sum((0, 1))
    for e in (hits > 0).nonzero().flatten().tolist():
        row, choice = (chosen == e).nonzero(as_tuple=True)
        out = out.index_add(0, row, m.experts[e](flat[row]) * weights[row, choice].unsqueeze(1))
    return x + out.view_as(x)


@CASES.block(parts=parts)
def a_sum_as_an_item(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, weights, chosen = routed(m, x)
    out = torch.zeros_like(flat)
    for e in range(EXPERTS):
        chose = chosen == e
        if chose.sum().item() == 0:
            continue
        row, choice = chose.nonzero(as_tuple=True)
        out[row] = out[row] + m.experts[e](flat[row]) * weights[row, choice].unsqueeze(-1)
    return x + out.view_as(x)


@CASES.block(parts=parts)
def how_many_rows(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, weights, chosen = routed(m, x, 1)
    out = torch.zeros_like(flat)
    for e in range(EXPERTS):
        row = (chosen[:, 0] == e).nonzero().squeeze(-1)
        if len(row):
            out = out.index_copy(0, row, m.experts[e](flat[row]) * weights[row])
    return x + out.view_as(x)


@CASES.block(parts=parts)
def not_any(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, weights, chosen = routed(m, x, 1)
    out = flat.clone()
    for e in range(EXPERTS):
        mask = chosen[:, 0] == e
        if not torch.any(mask):
            continue
        out[mask] = m.experts[e](flat[mask]) * weights[mask]
    return x + out.view_as(x)


@CASES.block(parts=parts)
def numel_within_a_function(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, weights, chosen = routed(m, x)

    out = torch.zeros_like(flat)
    for e in range(EXPERTS):
        _add(m, flat, weights, chosen, e, out)
    return x + out.view_as(x)


def _add(m: Subject, flat: Tensor, weights: Tensor, chosen: Tensor, e: int, out: Tensor) -> None:
    row, choice = torch.where(chosen == e)
    if row.numel() > 0:
        made = m.experts[e](flat[row])
        out.index_add_(0, row, made * weights[row, choice, None])


@CASES.block(parts=parts)
def tokens_that_are_special(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """Rows that the input selects, as of an adapter for some tokens."""
    out, special = x.clone(), ids == 3
    if special.any():
        out[special] = m.lonely(x[special])
    return out


@CASES.block(parts=parts)
def tokens_that_nobody_has(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    out, special = x.clone(), ids > 1000
    if special.any():
        out[special] = m.lonely(x[special])
    return out


@CASES.block(parts=parts)
def rows_before_and_after(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """A parameter that has a gradient also without the branch."""
    flat, weights, chosen = routed(m, x)
    out = m.experts[NEVER_CHOSEN](flat) * 1
    for e in range(EXPERTS):
        row, choice = torch.where(chosen == e)
        if row.numel():
            out = out.index_add(0, row, m.experts[e](flat[row]) * weights[row, choice, None])
    return x + out.view_as(x)


@CASES.block(parts=parts)
def one_within_another(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, _, chosen = routed(m, x, 1)
    out = torch.zeros_like(flat)
    for e in range(EXPERTS):
        mask = chosen[:, 0] == e
        if mask.any():
            out[mask] = m.experts[e](flat[mask])
            both = mask & (ids.reshape(-1) > 4)
            if both.any():
                out[both] = m.lonely(flat[both])
    return x + out.view_as(x)


@CASES.block(parts=parts)
def a_product_of_parameters(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, weights, chosen = routed(m, x)
    out = torch.zeros_like(flat)
    for e in range(EXPERTS):
        row, choice = torch.where(chosen == e)
        if row.numel() > 0:
            scale = m.lonely.bias * m.experts[e][2].weight[:, 0]
            out.index_add_(0, row, m.experts[e](flat[row]) * weights[row, choice, None] * scale)
    return x + out.view_as(x)


@CASES.block(parts=parts)
def a_part_without_a_gradient(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """Eager leaves the gradients of an expert's first part None, as of the router."""
    flat, weights, chosen = routed(m, x)
    out = torch.zeros_like(flat)
    for e in range(EXPERTS):
        row, choice = torch.where(chosen == e)
        if row.numel() > 0:
            first, act, second = m.experts[e]
            made = second(act(first(flat[row])).detach())
            out.index_add_(0, row, made * weights[row, choice, None].detach())
    return x + out.view_as(x)


@CASES.block(parts=parts)
def a_part_without_a_gradient_and_without_a_branch(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    out, mask = torch.zeros_like(x), ids == 3
    with torch.no_grad():
        rows = m.lonely(x[mask])
    out[mask] = m.experts[0](rows)
    return x + out


# ---- what is not to be taken


@CASES.block(NOT_TAKEN, parts)
def something_is_added_to_all_rows(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, _, chosen = routed(m, x)
    out = torch.zeros_like(flat)
    for e in range(EXPERTS):
        mask = (chosen == e).any(-1)
        if mask.any():
            out = out + m.experts[e](flat)
    return x + out.view_as(x)


@CASES.block(NOT_TAKEN, parts)
def another_mask_is_asked(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """The expert before has rows, or not."""
    flat, _, chosen = routed(m, x)
    out = torch.zeros_like(flat)
    for e in range(EXPERTS):
        mask, other = (chosen == e).any(-1), (chosen == (e + 1) % EXPERTS).any(-1)
        if other.any():
            out[mask] = m.experts[e](flat[mask])
    return x + out.view_as(x)


@CASES.block(NOT_TAKEN, parts)
def all_of_a_mask(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    out, mask = x.clone(), ids > 2
    if mask.all():
        out[mask] = m.lonely(x[mask])
    return out


@CASES.block(NOT_TAKEN, parts)
def more_than_one_row(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, _, chosen = routed(m, x)
    out = torch.zeros_like(flat)
    for e in range(EXPERTS):
        row = torch.where(chosen == e)[0]
        if row.shape[0] > 3:
            out = out.index_add(0, row, m.experts[e](flat[row]))
    return x + out.view_as(x)


@CASES.block(NOT_TAKEN, parts)
def a_step_is_counted(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    out = x.clone()
    for e in (2, 1000):
        mask = ids == e
        if mask.any():
            m.seen.add_(1)
            out[mask] = m.lonely(x[mask])
    return out


@CASES.block({**NOT_TAKEN, "compile": WHATEVER}, parts)
def a_list_is_made(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, _, chosen = routed(m, x)
    out, done = torch.zeros_like(flat), []
    for e in range(EXPERTS):
        mask = (chosen == e).any(-1)
        if mask.any():
            out[mask] = m.experts[e](flat[mask])
            done.append(e)
    return x + out.view_as(x) * len(done)


@CASES.block({**NOT_TAKEN, "compile": WHATEVER}, parts)
def a_number_is_counted(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, _, chosen = routed(m, x)
    out, done = torch.zeros_like(flat), 0
    for e in range(EXPERTS):
        mask = (chosen == e).any(-1)
        if mask.any():
            out[mask] = m.experts[e](flat[mask])
            done += 1
    return x + out.view_as(x) * done


@CASES.block(NOT_TAKEN, parts)
def another_name_of_what_changes(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    out = x.clone()
    rows = out.view(-1, WIDTH)
    mask = ids == 3
    if mask.any():
        out[mask] = m.lonely(x[mask])
        out = out + rows.sum(-1).view(ids.shape)[..., None]
    return out


@CASES.block(parts=parts)
def a_view_of_what_is_read_later(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    out = x.clone()
    rows, flat = out.view(-1, WIDTH), x.reshape(-1, WIDTH)
    mask = ids.reshape(-1) == 3
    if mask.any():
        rows[mask] = m.lonely(flat[mask])
    return out


@CASES.block(WHATEVER, parts, against="none")
def random_numbers_are_drawn(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    out = x.clone()
    for e in (1000, 3):
        mask = ids == e
        if mask.any():
            out[mask] = m.noise(m.lonely(x[mask]))
    return out


@CASES.block(NOT_TAKEN, parts)
def the_mean_of_the_rows(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    out, mask = x.clone(), ids == 3
    if mask.any():
        rows = m.lonely(x[mask])
        out[mask] = rows - rows.mean(0)
    return out


@CASES.block({**NOT_TAKEN, "compile": WHATEVER}, parts)
def what_the_last_one_has_left(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, _, chosen = routed(m, x)
    out, last = torch.zeros_like(flat), flat
    for e in range(EXPERTS):
        mask = (chosen == e).any(-1)
        if mask.any():
            last = m.experts[e](last)
            out[mask] = last[mask]
    return x + out.view_as(x)


# ---- found by an adversary


@CASES.block(parts=parts)
def views_that_need_a_row(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """Of no rows PyTorch does not know the last size."""
    flat, _, chosen = routed(m, x)
    out = torch.zeros_like(flat)
    for e in range(EXPERTS):
        mask = (chosen == e).any(-1)
        if mask.any():
            rows = flat[mask]
            out[mask] += m.experts[e](rows.view(rows.shape[0], 3, -1).flatten(1))
    return x + out.view_as(x)


@CASES.block(NOT_TAKEN, parts)
def the_first_of_the_rows(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    out, mask = x.clone(), ids > 1000
    if mask.any():
        rows = x[mask]
        out[mask] = m.lonely(rows) + rows[0] + rows.amax(0)
    return out


@CASES.block(NOT_TAKEN, parts)
def an_infinite_derivative(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """Zero times infinity, of a parameter that is read outside as well."""
    zero = m.unused.weight[0] * 0
    out, mask = x * (1 + zero), ids > 1000
    if mask.any():
        out[mask] = x[mask] * zero.sqrt()
    return out


@CASES.block(NOT_TAKEN, parts)
def two_names_of_one_value(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    out = x.clone()
    rows = out.view(-1, WIDTH)
    mask, other = ids.reshape(-1) == 3, ids == 3
    if mask.any():
        rows[mask] = m.lonely(x.reshape(-1, WIDTH)[mask])
        out[other] *= 2
    return out


@CASES.block(NOT_TAKEN, parts)
def read_by_another_name(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    out = x.clone()
    same, mask = out, ids == 3
    made = x.clone()
    if mask.any():
        out[mask] = m.lonely(x[mask])
        made[mask] = same[mask] * 2
    return out + made


@CASES.block(NOT_TAKEN, parts)
def changed_in_place_behind_it(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """Where it is not taken, the value is still the one from before."""
    x = x * 1
    made, mask = x, ids > 1000
    if mask.any():
        made = made.index_put((mask,), m.lonely(x[mask]))
    made += m.scale
    return x


@CASES.block(NOT_TAKEN, parts)
def is_it_the_one_from_before(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    made, mask = x, ids > 1000
    if mask.any():
        made = made.index_put((mask,), m.lonely(x[mask]))
    return x * 5 if made is x else x + made


@CASES.block(NOT_TAKEN, parts)
def is_it_the_key(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """A tensor as a key is found by which one it is."""
    made, mask = x * 1, ids > 1000
    scale = {made: 5.0}
    if mask.any():
        made = made.index_put((mask,), m.lonely(x[mask]))
    return x + made * scale.get(made, 1.0)


@CASES.block(NOT_TAKEN, parts)
def is_it_in_the_set(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    made, mask = x * 1, ids > 1000
    seen = {(made, 1)}
    if mask.any():
        made = made.index_put((mask,), m.lonely(x[mask]))
    return x + made * 3 if (made, 1) in seen else x - made


@CASES.block(NOT_TAKEN, parts)
def a_set_is_filled(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, _, chosen = routed(m, x)
    ran: set[int] = set()
    out = torch.zeros_like(flat)
    for e in range(EXPERTS):
        mask = (chosen == e).any(-1)
        if mask.any():
            out[mask] += m.experts[e](flat[mask])
            _unused = ran.add(e)  # type: ignore[func-returns-value]
    return x + out.view_as(x) / len(ran)


@CASES.block({**NOT_TAKEN, "compile": WHATEVER}, parts)
def a_slice_of_counts(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, _, chosen = routed(m, x)
    out = torch.zeros_like(flat)
    counts = torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()
    for e in range(EXPERTS):
        if counts[e : e + 1] == [0]:
            continue
        row, _ = torch.where(chosen == e)
        out[row] += m.experts[e](flat[row])
    return x + out.view_as(x)


@CASES.block({**NOT_TAKEN, "compile": WHATEVER}, parts)
def an_item_in_a_set(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, _, chosen = routed(m, x)
    out = torch.zeros_like(flat)
    for e in range(EXPERTS):
        mask = (chosen == e).any(-1)
        if mask.sum().item() in {0}:
            continue
        out[mask] += m.experts[e](flat[mask])
    return x + out.view_as(x)


@CASES.block(NOT_TAKEN, parts)
def hits_as_they_were(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, _, chosen = routed(m, x)
    out = torch.zeros_like(flat)
    counts = F.one_hot(chosen % 2, EXPERTS).sum((0, 1))
    hit = counts.nonzero()
    counts.copy_(F.one_hot(chosen, EXPERTS).sum((0, 1)))
    for e in hit:
        row, _ = torch.where(chosen == e)
        out.index_add_(0, row, m.experts[e](flat[row]))
    return x + out.view_as(x)


@CASES.block({**NOT_TAKEN, "compile": WHATEVER}, parts)
def the_last_hit_behind_a_break(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, _, chosen = routed(m, x)
    out, e = torch.zeros_like(flat), torch.zeros(1, dtype=torch.long)
    for turn in range(2):
        for e in F.one_hot(chosen, EXPERTS).sum((0, 1)).nonzero():
            row, _ = torch.where(chosen == e)
            out.index_add_(0, row, m.experts[e](flat[row]))
        if turn == 1:
            break
        e = torch.zeros(1, dtype=torch.long)
    return x + out.view_as(x) * (e + 1)


@CASES.block({**NOT_TAKEN, "compile": WHATEVER}, parts)
def the_last_hit_at_the_end(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, _, chosen = routed(m, x)
    out, e = torch.zeros_like(flat), torch.zeros(1, dtype=torch.long)
    try:
        for e in F.one_hot(chosen, EXPERTS).sum((0, 1)).nonzero():
            row, _ = torch.where(chosen == e)
            out.index_add_(0, row, m.experts[e](flat[row]))
    finally:
        scale = e + 1
    return x + out.view_as(x) * scale


@CASES.block(NOT_TAKEN, parts)
def an_assignment_before_a_break(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    other = made = x
    mask = ids == 3
    for k in range(2):
        if mask.any():
            made = made.index_put((mask,), m.lonely(x[mask]))
            other = x + 1
        if k == 1:
            break
        other = x * 0.5
    return made + other


@CASES.block({**NOT_TAKEN, "compile": WHATEVER}, parts)
def all_hits_in_one_row(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, _, chosen = routed(m, x)
    out = torch.zeros_like(flat)
    hits = F.one_hot(chosen, EXPERTS).sum((0, 1)) > 0
    for e in hits.nonzero().view(1, -1):
        mask = (chosen[..., None] == e).any(-1).any(-1)
        if mask.any():
            out[mask] += m.lonely(flat[mask])
    return x + out.view_as(x)


@CASES.block(NOT_TAKEN, parts)
def a_sum_that_overflows(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat = x.reshape(-1, WIDTH)
    out, mask = flat.clone(), torch.ones(flat.shape[0], dtype=torch.bool)
    if mask.repeat(2).sum(dtype=torch.int8) > 0:
        out[mask] = m.lonely(flat[mask])
    return out.view_as(x)


@CASES.block(parts=parts)
def asked_in_part_within_what_is_asked(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat = x.reshape(-1, WIDTH)
    out, a, b = flat.clone(), ids.flatten() > 3, ids.flatten() < 9
    if b.any():
        both = a & b
        out[both] = m.lonely(flat[both])
    return out.view_as(x)


@CASES.block(NOT_TAKEN, parts)
def hits_without_a_dim(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, _, chosen = routed(m, x)
    out = torch.zeros_like(flat)
    for e in (F.one_hot(chosen, EXPERTS).sum((0, 1)) > 0).nonzero().squeeze():
        mask = (chosen == e).any(-1)
        if mask.any():
            out[mask] += m.lonely(flat[mask])
    return x + out.view_as(x)
