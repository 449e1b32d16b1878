"""Rows that are sorted: which uses of an order are proved to keep rows apart, and which are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401  (registers a grouped product)
from graphs import WIDTH, OneLayer, one_layer, reasons
from torch import Tensor

from streambp_fx.passes.graph.facts import Local

EXPERTS, TOP = 4, 2
Body = Callable[["Routed"], Tensor]


class Routed:
    """Flat rows, which experts each has and with what weight, sorted by expert."""

    def __init__(self, m: OneLayer, x: Tensor, top: int = TOP) -> None:
        self.m, self.x, self.top = m, x, top
        self.flat = x.reshape(-1, WIDTH)
        self.logits = m.query(self.flat)[:, :EXPERTS]
        self.gates, self.chosen = self.logits.softmax(-1).topk(top, -1)
        self.keys, self.order = self.chosen.reshape(-1).sort()
        self.rows = self.flat[self.order // top]
        self.weights = torch.stack([m.query.weight, m.key.weight, m.value.weight, m.out.weight])

    def ends(self, keys: Tensor | None = None, bins: int = EXPERTS, high: int = EXPERTS - 1) -> Tensor:
        counted = self.keys if keys is None else keys
        return torch.histc(counted.float(), bins=bins, min=0, max=high).cumsum(0, dtype=torch.int32)

    def product(self, ends: Tensor | None = None, rows: Tensor | None = None) -> Tensor:
        rows = self.rows if rows is None else rows
        return torch.ops.transformers.grouped_mm_fallback(
            rows, self.weights, self.ends() if ends is None else ends
        )

    def back(self, y: Tensor) -> Tensor:
        y = y[self.order.argsort()].view(-1, self.top, y.shape[-1])
        return (y * self.gates.unsqueeze(-1)).sum(1).view_as(self.x)


def put_back(r: Routed) -> Tensor:
    places = torch.empty_like(r.order)
    places[r.order] = torch.arange(r.order.shape[0])
    return r.product()[places].view(-1, r.top, WIDTH).sum(1).view_as(r.x)


def written(r: Routed) -> Tensor:
    out = torch.zeros_like(r.rows)
    out[r.order] = r.product()
    return out.view(-1, r.top, WIDTH).sum(1).view_as(r.x)


def wide(r: Routed) -> Tensor:
    return (r.order // r.top).unsqueeze(-1).expand(-1, WIDTH)


def by_argsort(r: Routed) -> Tensor:
    """The places alone are asked for, and keys are looked up there."""
    chosen = r.chosen.reshape(-1)
    order = chosen.argsort()
    y = r.flat[order // r.top] * (1 + chosen[order]).unsqueeze(-1)
    return y[order.argsort()].view(-1, r.top, WIDTH).sum(1).view_as(r.x)


PROVED: dict[str, Body] = {
    "argsort alone": by_argsort,
    "argsort twice": lambda r: r.back(r.product()),
    "put back": put_back,
    "written": written,
    "added": lambda r: torch.zeros_like(r.flat).index_add(0, r.order // 2, r.product()).view_as(r.x),
    "added to rows": lambda r: r.flat.index_add(0, r.order // 2, r.product(), alpha=0.5).view_as(r.x),
    "accumulated": lambda r: r.flat.index_put((r.order // 2,), r.product(), True).view_as(r.x),
    "scattered": lambda r: r.flat.scatter_add(0, wide(r), r.product()).view_as(r.x),
    "copied": lambda r: r.back(r.rows) + torch.zeros_like(r.rows).index_copy(0, r.order, r.rows)[::1]
    .view(-1, r.top, WIDTH)
    .sum(1)
    .view_as(r.x),
    "counts of what was chosen": lambda r: r.back(r.product(r.ends(r.chosen))),
    "counts of a view": lambda r: r.back(r.product(r.ends(r.chosen.t().contiguous()))),
    "a table by key": lambda r: r.back(r.product() + r.m.key.weight[r.keys]),
    "selected": lambda r: r.back(r.product(rows=r.flat.index_select(0, half(r.order)))),
    "which choice": lambda r: r.back(r.rows * (1 + r.order % 2).unsqueeze(-1)),
    "by a score": lambda r: _by_score(r),
}  # fmt: skip


def half(order: Tensor) -> Tensor:
    return order.div(2, rounding_mode="floor")


def _by_score(r: Routed) -> Tensor:
    """Rows in the order of a number that has a gradient, and back."""
    scores, order = r.logits[:, 0].sort(descending=True)
    return (r.flat[order] * scores.unsqueeze(-1))[order.argsort()].view_as(r.x)


REFUSED: dict[str, Body] = {
    "rolled": lambda r: r.back(r.rows.roll(1, 0)),
    "running sum": lambda r: r.back(r.rows.cumsum(0)),
    "softmax": lambda r: r.back(r.rows.softmax(0)),
    "mean": lambda r: r.back(r.rows - r.rows.mean(0)),
    "in pairs": lambda r: r.back(r.rows.view(-1, 2, WIDTH).flip(1).reshape(-1, WIDTH)),
    "sliced": lambda r: r.back(F.pad(r.rows[1:], (0, 0, 0, 1))),
    "not brought back": lambda r: r.rows.view(-1, r.top, WIDTH).sum(1).view_as(r.x),
    "brought further away": lambda r: r.rows[r.order].view(-1, r.top, WIDTH).sum(1).view_as(r.x),
    "places as positions": lambda r: torch.zeros_like(r.rows)
    .index_add(0, r.order.argsort(), r.rows)
    .view(-1, r.top, WIDTH)
    .sum(1)
    .view_as(r.x),
    "positions as numbers": lambda r: r.back(r.rows * r.order.unsqueeze(-1)),
    "positions by three": lambda r: r.back(r.flat[r.order // 3]),
    "positions plus one": lambda r: r.back(r.flat[(r.order // 2 + 1) % 5]),
    "a remainder by three": lambda r: r.back(r.rows * (r.order % 3).unsqueeze(-1)),
    "counts as numbers": lambda r: r.back(r.rows / (1 + r.ends()[r.keys].unsqueeze(-1))),
    "counts of other keys": lambda r: r.back(r.product(r.ends((r.logits * 2).topk(2, -1).indices))),
    "counts of half": lambda r: r.back(r.product(r.ends(r.chosen[:, 0]))),
    "counts in the wrong bins": lambda r: r.back(r.product(r.ends(high=EXPERTS))),
    "keys that may be missed": lambda r: r.back(_shifted_keys(r)),
    "descending": lambda r: _descending(r),
    "rows as they were": lambda r: r.product(rows=r.flat.repeat_interleave(2, 0))
    .view(-1, r.top, WIDTH)
    .sum(1)
    .view_as(r.x),
    "put over each other": lambda r: r.flat.index_put((r.order // 2,), r.rows).view_as(r.x),
    "copied over each other": lambda r: r.flat.index_copy(0, r.order // 2, r.rows).view_as(r.x),
    "an order of positions of pairs": lambda r: r.rows[(r.order // 2).argsort()].view(-1, 2, WIDTH)
    .sum(1)
    .view_as(r.x),
    "an order turned": lambda r: r.back(r.rows) + r.rows[r.order.argsort(descending=True)]
    .view(-1, 2, WIDTH)
    .sum(1)
    .view_as(r.x),
    "two orders": lambda r: r.back(r.rows + r.flat.repeat_interleave(2, 0)[r.gates.view(-1).argsort()]),
}  # fmt: skip


def _shifted_keys(r: Routed) -> Tensor:
    keys, order = (r.chosen - (r.chosen == 1).long() * 2).view(-1).sort()
    return r.product(r.ends(keys), r.flat[order // 2])


def _descending(r: Routed) -> Tensor:
    _, order = r.chosen.view(-1).sort(descending=True)
    y = r.product(rows=r.flat[order // 2])
    return y[order.argsort()].view(-1, 2, WIDTH).sum(1).view_as(r.x)


@pytest.mark.parametrize("name", PROVED)
def test_proved(name: str) -> None:
    facts = one_layer(lambda m, x: PROVED[name](Routed(m, x)))
    assert not facts.refusals and not reasons(facts)
    assert all(s.chunked for s in facts.segments)
    assert {Local.SORTED, Local.POSITIONS} & {v.kind for v in facts.local.values()}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    facts = one_layer(lambda m, x: REFUSED[name](Routed(m, x)))
    assert facts.refusals or reasons(facts)
    assert not all(s.chunked for s in facts.segments)


def test_an_order_of_data_is_no_order_of_a_chunk() -> None:
    def body(m: OneLayer, x: Tensor) -> Tensor:
        order = torch.arange(x.shape[1]).flip(0).argsort()
        return x[:, order]

    assert reasons(one_layer(body))
