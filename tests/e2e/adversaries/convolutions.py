"""Convolutions along the sequence: those that read backwards are windows; others read later rows."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from e2e_adversary import WARNED, WHATEVER, Cases
from e2e_subject import WIDTH, Subject, heads, joined
from torch import Tensor, nn

CASES = Cases("convolutions")


def parts() -> dict[str, Any]:
    return {
        "conv": nn.Conv1d(WIDTH, WIDTH, 4, padding=3, groups=WIDTH),
        "full": nn.Conv1d(WIDTH, WIDTH, 3, padding=2, bias=False),
        "far": nn.Conv1d(WIDTH, WIDTH, 3, padding=18, dilation=9, groups=3),
        "same": nn.Conv1d(WIDTH, WIDTH, 3, padding=1),
        "bare": nn.Conv1d(WIDTH, WIDTH, 3),
        "wide": nn.Conv1d(WIDTH, 2 * WIDTH, 2, padding=1),
        "one": nn.Conv1d(WIDTH, WIDTH, 1),
    }


def along(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


@CASES.block(parts=parts)
def cut_at_the_end(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + F.silu(m.conv(along(x))[..., : x.shape[1]]).transpose(1, 2)


@CASES.block(parts=parts)
def cut_by_a_number(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + along(m.full(along(m.lin(x)))[:, :, :-2])


@CASES.block(parts=parts)
def of_rows_far_apart(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + along(m.far(along(x))[..., : x.shape[1]]).tanh()


@CASES.block(parts=parts)
def padded_before(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x * along(m.bare(F.pad(along(x), (2, 0)))).sigmoid()


@CASES.block(parts=parts)
def of_more_channels(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    a, b = along(m.wide(along(x))[..., : x.shape[1]]).chunk(2, -1)
    return x + a * b.sigmoid()


@CASES.block(parts=parts)
def of_one_row(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + along(m.one(along(x))[..., : x.shape[1]])


@CASES.block(parts=parts)
def two_in_a_row(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """Each reads what the other has made of rows before."""
    for _ in range(2):
        x = x + along(m.conv(along(m.norm(x)))[..., : x.shape[1]])
    return x


@CASES.block(parts=parts)
def before_an_attention(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """Queries, keys and values of convolved rows."""
    q, k, v = (along(m.conv(along(p(x)))[..., : x.shape[1]]) for p in (m.q, m.k, m.v))
    return x + joined(F.scaled_dot_product_attention(heads(q), heads(k), heads(v), is_causal=True))


@CASES.block(parts=parts)
def along_the_width(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """Each row by itself: what is convolved are its entries."""
    rows = x.reshape(-1, 1, WIDTH)
    kernel = m.conv.weight[:2, :, :3]
    return x + F.conv1d(rows, kernel, padding=2)[..., :WIDTH].mean(1).view_as(x)


@CASES.block(parts=lambda: {"apart": nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH)})
def of_channels_of_all_samples(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """Samples lie beside channels: how many groups there are depends on the batch."""
    samples, rows, _ = x.shape
    weight = m.apart.weight.repeat(samples, 1, 1)
    own = F.pad(x.transpose(1, 2).reshape(1, samples * WIDTH, rows), (2, 0))
    made = F.conv1d(own, weight, groups=samples * WIDTH)
    return x + made.view(samples, WIDTH, rows).transpose(1, 2)


@CASES.block(parts=parts)
def padded_once_for_two(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """The second reads what the first has made of zeros."""
    first = F.conv1d(F.pad(along(x), (5, 0)), m.conv.weight, m.conv.bias, groups=WIDTH)
    return x + along(F.conv1d(first, m.full.weight, m.same.bias)).tanh()


@CASES.block(parts=parts)
def padded_once_for_two_in_groups(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    first = F.conv1d(F.pad(along(x), (4, 0)), m.full.weight, m.same.bias)
    second = F.conv1d(first, m.far.weight[..., :2], groups=3, dilation=2)
    without = F.conv1d(F.conv1d(F.pad(along(x), (4, 0)), m.full.weight), m.same.weight, m.same.bias)
    return x + along(second + without).tanh()


@CASES.block(WARNED, parts)
def padded_too_much_for_two(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    first = F.conv1d(F.pad(along(x), (6, 0)), m.conv.weight, m.conv.bias, groups=WIDTH)
    return x + along(F.conv1d(first, m.full.weight)[..., :-1])


@CASES.block(WARNED, parts)
def that_reads_a_later_row(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + along(m.same(along(x)))


@CASES.block(WARNED, parts)
def cut_in_another_place(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + along(m.conv(along(x))[..., 1 : x.shape[1] + 1])


@CASES.block(WARNED, parts)
def padded_behind(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + along(m.bare(F.pad(along(x), (0, 2))))


@CASES.block(WARNED, parts)
def padded_with_ones(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + along(m.bare(F.pad(along(x), (2, 0), value=1.0)))


@CASES.block(WARNED, parts)
def over_channels_of_rows(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """Rows are the channels of it: they are summed."""
    weight = m.lin.weight[:, :1, None].expand(WIDTH, 1, 3)[: x.shape[0]]
    mixed = F.conv1d(x.mean(1, keepdim=True), weight[:1], padding=1)
    return x + mixed


@CASES.block(WARNED, parts)
def made_of_rows(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """The weight is a mean over all rows."""
    weight = x.mean((0, 1))[:, None, None].expand(WIDTH, 1, 3)
    return x + along(F.conv1d(F.pad(along(x), (2, 0)), weight, groups=WIDTH))


# ---- rows that come later


def one_later(x: Tensor, first: Tensor | None = None) -> Tensor:
    first = x.new_zeros(x.shape[0], 1, x.shape[2]) if first is None else first.expand(x.shape[0], 1, -1)
    return torch.cat([first, x[:, :-1]], 1)


def _some(ids: Tensor) -> Tensor:
    return (ids % 5 == 0)[..., None]


CASES.blocks(
    {
        "after zeros": lambda m, x, ids: x + m.lin(one_later(x)),
        "after what is learned": lambda m, x, ids: x + m.lin(one_later(x, m.scale[None, None])),
        "after a product with zeros": lambda m, x, ids: (
            x + one_later(m.lin(x), m.lin(x.new_zeros(x.shape[0], 1, WIDTH)))
        ),
        "twice": lambda m, x, ids: x + one_later(one_later(x)) * m.scale,
        "by padding": lambda m, x, ids: x + F.pad(m.lin(x), (0, 0, 1, -1)),
        "by three": lambda m, x, ids: x + F.pad(x, (0, 0, 3, -3)).sigmoid(),
        "infinite in some rows": lambda m, x, ids: (
            x + F.pad(x.masked_fill(_some(ids), -math.inf), (0, 0, 1, -1)).clamp(min=-3)
        ),
        "not a number in some rows": lambda m, x, ids: (
            x + one_later(x.masked_fill(_some(ids), math.nan)).nan_to_num(0.1)
        ),
        "some entries infinite": lambda m, x, ids: (
            x + F.pad(x.masked_fill(torch.arange(WIDTH) % 4 == 1, -math.inf), (0, 0, 2, -2)).softmax(-1)
        ),
        "mixed with its own": lambda m, x, ids: x + m.lin(x * 0.3 + nn.ZeroPad2d((0, 0, 1, -1))(x) * 0.7),
    }
)
for _name, _moved in {
    "a row earlier": lambda m, x, ids: x + F.pad(x, (0, 0, -1, 1)),
    "a row earlier, by parts": lambda m, x, ids: x + torch.cat([x[:, 1:], x[:, :1] * 0], 1),
    "after its own first": lambda m, x, ids: x + torch.cat([x[:, :1], x[:, :-1]], 1),
    "after its own last": lambda m, x, ids: x + torch.cat([x[:, -1:], x[:, :-1]], 1),
    "padded with ones, moved": lambda m, x, ids: x + F.pad(x, (0, 0, 1, -1), value=1.0),
}.items():
    CASES.block(WARNED, name=_name)(_moved)
CASES.block(name="entries moved, not rows")(lambda m, x, ids: x + F.pad(x, (1, -1)))
CASES.block(WHATEVER, name="samples moved")(lambda m, x, ids: x + F.pad(x, (0, 0, 0, 0, 1, -1)))
