"""Attention over columns that lie on other devices: two ops, which ask whoever brings those columns.

NOTE [columns in blocks]: a device that has some rows of a sequence holds the keys and values of its own rows
alone. Those of the others come while a chunk runs, one block of columns after the other, and are let go: what
they add to the output is merged by log-sum-exp, and their gradients go back to where they come from. A traced
program cannot know what comes, so there it is one op. It runs within an `Exchange`, which all devices enter
at the same time, with one chunk each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Protocol

import torch
from torch import Tensor


class NotByBlocks(Exception):
    """A chunk program cannot read columns block by block."""


class Exchange(Protocol):
    """Brings the columns of other devices, block by block.

    Shapes: query and out (B, H, c, D), of a chunk; key and value (B, H or fewer, n, D), views of the first n
    columns of this device's; log-sum-exp (B, H, c), float32 or wider.
    """

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp over all columns, in the shapes of those over the device's own."""

    def differentiate(
        self,
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_gradient: Tensor,
        value_gradient: Tensor,
        out: Tensor,
        lse: Tensor,
        scale: float | None,
    ) -> Tensor:
        """The gradient of the query, in its shape and dtype, that comes through columns of others.

        What the chunks of other devices add to the gradients of this device's keys and values is added to
        `key_gradient` and `value_gradient`, which are views as `key` and `value` are.

        Args:
            out, lse: over all columns.
        """


_exchange: ContextVar[Exchange | None] = ContextVar("streambp_exchange", default=None)


@contextlib.contextmanager
def within(exchange: Exchange) -> Iterator[None]:
    """Within: the ops ask this exchange."""
    before = _exchange.set(exchange)
    try:
        yield
    finally:
        _exchange.reset(before)


def _current() -> Exchange:
    exchange = _exchange.get()
    if exchange is None:
        raise RuntimeError("a program that reads columns of other devices is run outside of an exchange")
    return exchange


_LIBRARY = torch.library.Library("streambp_fx", "FRAGMENT")
_LIBRARY.define(
    "attend_to_others(Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, float? scale) "
    "-> (Tensor, Tensor)"
)
_LIBRARY.define(
    "attend_to_others_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, "
    "Tensor(a!) grad_key, Tensor(b!) grad_value, Tensor out, Tensor lse, float? scale) -> Tensor"
)
ATTEND_TO_OTHERS = torch.ops.streambp_fx.attend_to_others.default
ATTEND_TO_OTHERS_BACKWARD = torch.ops.streambp_fx.attend_to_others_backward.default


def _forward(*operands: Tensor) -> tuple[Tensor, Tensor]:
    return _current().attend(*operands)  # type: ignore[call-arg, arg-type]


def _backward(*operands: Tensor) -> Tensor:
    return _current().differentiate(*operands)  # type: ignore[call-arg, arg-type]


def _fake_forward(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scale: float | None
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(lse)


def _fake_backward(grad_out: Tensor, query: Tensor, *_: object) -> Tensor:
    return torch.empty_like(query)


for _name, _run, _fake in (
    ("attend_to_others", _forward, _fake_forward),
    ("attend_to_others_backward", _backward, _fake_backward),
):
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"streambp_fx::{_name}", _fake)
