"""Mixtures of experts: rows that are sorted by expert and brought back, in the ways people write it; and what
looks alike and mixes rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401  (registers a grouped product that takes float64)
from e2e_adversary import PARTLY, REFUSED, STREAMED, WARNED, Cases
from e2e_subject import WIDTH, Subject
from torch import Tensor, nn

CASES = Cases("experts")
EXPERTS, TOP, INNER = 5, 2, 7


def parts() -> dict[str, Any]:
    return {
        "router": nn.Linear(WIDTH, EXPERTS),
        "up": nn.Parameter(0.4 * torch.randn(EXPERTS, WIDTH, INNER)),
        "down": nn.Parameter(0.4 * torch.randn(EXPERTS, INNER, WIDTH)),
        "bias": nn.Parameter(0.4 * torch.randn(EXPERTS, INNER)),
        "experts": nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS)),
    }


def routed(m: Subject, x: Tensor, top: int = TOP) -> tuple[Tensor, Tensor, Tensor]:
    """Flat rows, the weights of their experts, and their experts."""
    flat = x.reshape(-1, WIDTH)
    weights, chosen = m.router(flat).softmax(-1).topk(top, dim=-1)
    return flat, weights, chosen


def ends_of(keys: Tensor, count: int = EXPERTS) -> Tensor:
    counts = torch.histc(keys.float(), bins=count, min=0, max=count - 1)
    return torch.cumsum(counts, 0, dtype=torch.int32)


def grouped(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return torch.ops.transformers.grouped_mm_fallback(rows, weights, ends)


def expert(m: Subject, rows: Tensor, keys: Tensor, ends: Tensor) -> Tensor:
    return grouped(F.silu(grouped(rows, m.up, ends) + m.bias[keys]), m.down, ends)


# ---- dispatch that is streamed


@CASES.block(parts=parts)
def sorted_and_put_back(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """As transformers does it."""
    flat, weights, chosen = routed(m, x)
    keys, order = torch.sort(chosen.reshape(-1))
    y = expert(m, flat[order // TOP], keys, ends_of(keys)) * weights.reshape(-1)[order].unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.size(0), device=order.device)
    return x + y[back].view(-1, TOP, WIDTH).sum(1).view(x.shape)


@CASES.block(parts=parts)
def argsorted_twice(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, weights, chosen = routed(m, x)
    keys = chosen.flatten()
    order = keys.argsort(stable=True)
    y = expert(m, flat.index_select(0, order // TOP), keys[order], ends_of(keys))
    y = y.index_select(0, order.argsort()).view(-1, TOP, WIDTH)
    return x + (y * weights[..., None]).sum(1).view_as(x)


@CASES.block(parts=parts)
def added_by_index(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, weights, chosen = routed(m, x)
    keys, order = chosen.view(-1).sort()
    rows = torch.div(order, TOP, rounding_mode="floor")
    y = expert(m, flat[rows], keys, ends_of(chosen)) * weights.view(-1)[order, None]
    return x + torch.zeros_like(flat).index_add_(0, rows, y).view_as(x)


@CASES.block(parts=parts)
def scattered(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, weights, chosen = routed(m, x)
    keys, order = chosen.view(-1).sort()
    rows = (order // TOP).unsqueeze(-1).expand(-1, WIDTH)
    y = expert(m, flat[order // TOP], keys, ends_of(keys)) * weights.view(-1)[order].unsqueeze(1)
    return flat.scatter_add(0, rows, y).view_as(x)


@CASES.block(parts=parts)
def written_where_it_was(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, weights, chosen = routed(m, x)
    keys, order = chosen.view(-1).sort()
    y = expert(m, flat[order // TOP], keys, ends_of(keys))
    out = torch.zeros_like(y)
    out[order] = y
    return x + (out.view(-1, TOP, WIDTH) * weights.unsqueeze(-1)).sum(1).view_as(x)


@CASES.block(parts=parts)
def one_expert_a_row(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, weights, chosen = routed(m, x, 1)
    keys, order = chosen.view(-1).sort()
    y = expert(m, flat[order], keys, ends_of(keys))
    return x + (y[order.argsort()] * weights).view_as(x)


@CASES.block(parts=parts)
def weights_of_each_row(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, weights, chosen = routed(m, x)
    rows = flat.repeat_interleave(TOP, 0)
    y = torch.bmm(rows.unsqueeze(1), m.up[chosen.view(-1)]).squeeze(1)
    y = torch.bmm(F.silu(y).unsqueeze(1), m.down[chosen.view(-1)]).squeeze(1)
    return x + (y * weights.view(-1, 1)).view(-1, TOP, WIDTH).sum(1).view_as(x)


@CASES.block(parts=parts)
def all_experts_for_all_rows(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, weights, chosen = routed(m, x)
    gates = torch.zeros(flat.shape[0], EXPERTS, dtype=x.dtype).scatter(1, chosen, weights)
    y = sum(m.experts[k](flat) * gates[:, k, None] for k in range(EXPERTS))
    return x + y.view_as(x)


@CASES.block(parts=parts)
def one_hot_gates(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    weights, chosen = m.router(x).softmax(-1).topk(TOP, dim=-1)
    gates = (F.one_hot(chosen, EXPERTS) * weights[..., None]).sum(-2)
    return x + torch.einsum("bte,bted->btd", gates, torch.stack([e(x) for e in m.experts], 2))


@CASES.block(parts=parts)
def two_mixtures(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return argsorted_twice(m, m.norm(sorted_and_put_back(m, x, ids)), ids)


@CASES.block(parts=parts)
def which_choice_it_was(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, _, chosen = routed(m, x)
    keys, order = chosen.view(-1).sort()
    y = expert(m, flat[order // TOP], keys, ends_of(keys)) * (1 + order % TOP).unsqueeze(-1)
    return x + y[order.argsort()].view(-1, TOP, WIDTH).sum(1).view_as(x)


# ---- what looks alike


def _sorted_by_expert(m: Subject, x: Tensor, top: int = TOP) -> tuple[Tensor, ...]:
    flat, _, chosen = routed(m, x, top)
    keys, order = chosen.reshape(-1).sort()
    return flat, keys, order, flat[order // top]


def _back(x: Tensor, order: Tensor, y: Tensor, top: int = TOP) -> Tensor:
    return x + y[order.argsort()].view(-1, top, WIDTH).sum(1).view_as(x)


@CASES.block(WARNED, parts)
def differences_of_neighbours_in_the_order(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    _, _, order, rows = _sorted_by_expert(m, x)
    return _back(x, order, rows - rows.roll(1, 0))


@CASES.block(WARNED, parts)
def running_sum_in_the_order(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    _, _, order, rows = _sorted_by_expert(m, x)
    return _back(x, order, 0.1 * rows.cumsum(0))


@CASES.block(WARNED, parts)
def softmax_in_the_order(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    _, _, order, rows = _sorted_by_expert(m, x)
    return _back(x, order, rows.softmax(0))


@CASES.block(WARNED, parts)
def pairs_in_the_order(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    _, _, order, rows = _sorted_by_expert(m, x)
    pairs = rows.view(-1, TOP, WIDTH)
    return _back(x, order, (pairs - pairs.mean(1, keepdim=True)).view(-1, WIDTH))


@CASES.block(WARNED, parts)
def never_brought_back(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    _, _, _, rows = _sorted_by_expert(m, x)
    return x + rows.view(-1, TOP, WIDTH).sum(1).view_as(x)


@CASES.block(WARNED, parts)
def brought_further_away(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    _, _, order, rows = _sorted_by_expert(m, x)
    return x + rows[order].view(-1, TOP, WIDTH).sum(1).view_as(x)


@CASES.block(WARNED, parts)
def beside_rows_that_are_not_sorted(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, _, order, rows = _sorted_by_expert(m, x, 1)
    return _back(x, order, rows * flat.sigmoid(), 1)


@CASES.block(WARNED, parts)
def beside_data_that_is_not_sorted(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    _, _, order, rows = _sorted_by_expert(m, x, 1)
    return _back(x, order, rows * (1 + ids.view(-1, 1) % 3), 1)


@CASES.block(parts=parts)
def data_in_the_order(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    _, _, order, rows = _sorted_by_expert(m, x, 1)
    return _back(x, order, rows * (1 + ids.view(-1)[order].unsqueeze(-1) % 3), 1)


@CASES.block(WARNED, parts)
def a_loss_beside_targets_that_are_not_sorted(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, _, order, _ = _sorted_by_expert(m, x, 1)
    losses = F.cross_entropy(m.head(flat[order]), ids.reshape(-1), reduction="none")
    return x * (1 + 0.1 * losses[order.argsort()].view(*ids.shape, 1))


@CASES.block(WARNED, parts)
def a_product_plus_data_that_is_not_sorted(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    _, keys, order, rows = _sorted_by_expert(m, x, 1)
    data = (ids.reshape(-1, 1, 1) % 5).to(x.dtype).expand(-1, 1, INNER)
    y = torch.bmm(torch.baddbmm(data, rows.unsqueeze(1), m.up[keys]), m.down[keys])
    return _back(x, order, y.squeeze(1), 1)


@CASES.block(WARNED, parts)
def positions_as_numbers(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    _, _, order, rows = _sorted_by_expert(m, x)
    return _back(x, order, rows * (1 + 0.01 * order.unsqueeze(-1)))


@CASES.block(WARNED, parts)
def positions_divided_by_something_else(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, _, order, _ = _sorted_by_expert(m, x)
    return _back(x, order, flat[order // 3])


@CASES.block(WARNED, parts)
def counts_as_numbers(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    _, keys, order, rows = _sorted_by_expert(m, x)
    counts = torch.histc(keys.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
    return _back(x, order, rows / (1 + counts[keys].unsqueeze(-1)))


@CASES.block(WARNED, parts)
def counts_of_other_keys(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, _, chosen = routed(m, x)
    keys, order = chosen.view(-1).sort()
    others = m.router(flat * m.scale).topk(TOP, -1).indices
    return _back(x, order, expert(m, flat[order // TOP], keys, ends_of(others)))


@CASES.block(WARNED, parts)
def counts_of_half_of_the_keys(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, _, chosen = routed(m, x)
    keys, order = chosen.view(-1).sort()
    return _back(x, order, expert(m, flat[order // TOP], keys, ends_of(chosen[:, 0])))


@CASES.block(WARNED, parts)
def sorted_the_other_way_round(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, _, chosen = routed(m, x)
    keys, order = chosen.view(-1).sort(descending=True)
    return _back(x, order, expert(m, flat[order // TOP], keys, ends_of(keys)))


@CASES.block(WARNED, parts)
def keys_that_are_not_counted(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """A key of -1 moves all the others, and the groups do not."""
    flat, _, chosen = routed(m, x)
    moved = (chosen - (chosen == 2).long() * 3).view(-1)
    keys, order = moved.sort()
    y = grouped(F.silu(grouped(flat[order // TOP], m.up, ends_of(keys))), m.down, ends_of(keys))
    return _back(x, order, y)


@CASES.block(WARNED, parts)
def capacity(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """Rows beyond the capacity of their expert are dropped: which ones depends on those before."""
    flat, weights, chosen = routed(m, x, 1)
    hot = F.one_hot(chosen.view(-1), EXPERTS)
    place = (hot.cumsum(0) * hot).sum(-1)
    kept = (place <= 3).to(x.dtype).unsqueeze(-1)
    return x + (m.lin(flat) * weights * kept).view_as(x)


@CASES.block(WARNED, parts)
def experts_choose(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat = x.reshape(-1, WIDTH)
    weights, rows = m.router(flat).softmax(-1).t().topk(4, dim=-1)
    y = torch.bmm(F.silu(torch.bmm(flat[rows], m.up)), m.down) * weights.unsqueeze(-1)
    return x + torch.zeros_like(flat).index_add(0, rows.view(-1), y.view(-1, WIDTH)).view_as(x)


@CASES.block(WARNED, parts)
def put_over_each_other(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """Which of a row's two experts is last depends on the order; here both say the same."""
    flat, _, order, rows = _sorted_by_expert(m, x)
    return x + torch.zeros_like(flat).index_put((order // TOP,), m.lin(rows)).view_as(x)


@CASES.block(WARNED, parts)
def sorted_along_the_sequence(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + x.sort(1).values


@CASES.block(WARNED, parts)
def sorted_by_data(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """Experts by the hash of a token."""
    flat = x.reshape(-1, WIDTH)
    keys, order = (ids.view(-1) % EXPERTS).sort()
    y = grouped(flat[order], m.up, ends_of(keys))
    return x + grouped(F.silu(y), m.down, ends_of(keys))[order.argsort()].view_as(x)


@CASES.loss(f"{STREAMED}|{PARTLY}", parts)
def counts_are_returned(m: Subject, x: Tensor, ids: Tensor) -> Any:
    _, keys, order, rows = _sorted_by_expert(m, x)
    counts = torch.histc(keys.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
    y = _back(x, order, expert(m, rows, keys, ends_of(keys)))
    return F.cross_entropy(m.head(y).flatten(0, 1), ids.flatten()), counts


@CASES.loss(f"{STREAMED}|{PARTLY}", parts)
def balance(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """The auxiliary loss of a mixture: means over all rows enter the objective."""
    flat, _, chosen = routed(m, x)
    y = sorted_and_put_back(m, x, ids)
    share = F.one_hot(chosen, EXPERTS).to(x.dtype).mean((0, 1))
    aux = EXPERTS * (share * m.router(flat).softmax(-1).mean(0)).sum()
    z = m.router(flat).logsumexp(-1).square().mean()
    return F.cross_entropy(m.head(y).flatten(0, 1), ids.flatten()) + 0.1 * aux + 0.01 * z


# ---- how many rows an expert has is asked of the data, which no graph can


@CASES.block({"compile": WARNED, "transform": REFUSED}, parts)
def split_by_counts_that_are_read(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    flat, weights, chosen = routed(m, x)
    keys = chosen.reshape(-1)
    order = keys.argsort()
    rows = flat[order // TOP].split(torch.bincount(keys, minlength=EXPERTS).tolist())
    y = torch.cat([own(part) for own, part in zip(m.experts, rows, strict=True)])
    back = torch.empty_like(y).index_copy(0, order, y).view(-1, TOP, WIDTH)
    return x + (back * weights.unsqueeze(-1)).sum(1).view_as(x)
