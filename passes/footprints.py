"""footprints: which rows of its operands a row reads.

Most values are ROW: row i reads row i. Where an op reads columns, a mask limits them; here it is proved
by how much: CAUSAL [0, i], WINDOW [i - w + 1, i] or FULL.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from .ir import Facts, Kind, Mixing, Reach, Role
from .masks import analyze
from .rules.pointwise import pointwise_ops

aten = torch.ops.aten


@dataclass(frozen=True)
class Support:
    """Where a (row, column) value is other than "masked out": minus infinity, or zero after softmax."""

    mask: Node
    zero: bool = False


def footprints(facts: Facts) -> Facts:
    """Prove the reach of every mixing op from its mask."""
    support: dict[Node, Support] = {}
    for node in facts.nodes:
        found = _support(facts, node, support)
        if found is not None:
            support[node] = found
    for mixing in facts.mixings.values():
        if mixing.mask is None and mixing.node.target is not aten.scaled_dot_product_attention.default:
            known = support.get(mixing.node.args[0])
            if _contracts_columns(facts, mixing) and known is not None and known.zero:
                mixing.mask = known.mask
        if mixing.mask is not None and mixing.reach is Reach.FULL:
            mixing.reach, mixing.window = _reach(facts, mixing.mask)
    _scores_follow_their_reader(facts)
    return facts


def mask_facts(facts: Facts, mask: Node) -> Any:
    """What is proved about a mask (cached on the facts)."""
    if mask not in facts.masks:
        facts.masks[mask] = _analyze(facts, mask, true_attends=True)
    return facts.masks[mask]


def _analyze(facts: Facts, mask: Node, true_attends: bool) -> Any:
    is_whole = lambda n: facts.kinds.get(n) is Kind.WHOLE  # noqa: E731
    return analyze(mask, facts.sequence, is_whole, true_attends=true_attends)  # type: ignore[arg-type]


def _reach(facts: Facts, mask: Node) -> tuple[Reach, Any]:
    known = mask_facts(facts, mask)
    if not known.causal:
        return Reach.FULL, None
    return (Reach.WINDOW, known.window) if known.window is not None else (Reach.CAUSAL, None)


def _has_columns(facts: Facts, node: Node) -> bool:
    return any(a is not None and a.role is Role.COLUMN for a in facts.layouts.get(node) or ())


def _contracts_columns(facts: Facts, mixing: Mixing) -> bool:
    return not _has_columns(facts, mixing.node)


def _support(facts: Facts, node: Node, support: dict[Node, Support]) -> Support | None:
    """The mask that a (row, column) value is known to respect."""
    if facts.kinds.get(node) is not Kind.STREAM or not _has_columns(facts, node):
        return None
    if node.target in (aten.add.Tensor, aten.baddbmm.default):
        for operand in node.all_input_nodes:
            if operand in support and not support[operand].zero:
                return support[operand]
        return _additive(facts, node)
    if node.target in (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        source, mask, value = node.args
        if isinstance(value, (int, float)) and _masks_out(node, value) and _is_mask(facts, mask):
            return support.get(source) or _hidden(facts, mask)
        return None
    carried = support.get(node.args[0]) if node.args and isinstance(node.args[0], Node) else None
    if carried is None:
        return None
    if node.target in (aten.softmax.int, aten._softmax.default):
        axis = facts.layouts[node][node.args[1]]  # type: ignore[index]
        over_columns = axis is not None and axis.role is Role.COLUMN
        return Support(carried.mask, zero=True) if over_columns else None
    keeps = node.target in KEEPS or (carried.zero and node.target in KEEPS_ZERO)
    return carried if keeps else None


def _masks_out(node: Node, value: float) -> bool:
    return value == -math.inf or value <= torch.finfo(node.meta["val"].dtype).min / 2


def _is_mask(facts: Facts, node: Any) -> bool:
    return isinstance(node, Node) and facts.kinds.get(node) in (Kind.SQUARE, Kind.WHOLE)


def _additive(facts: Facts, node: Node) -> Support | None:
    for operand in node.all_input_nodes:
        if _is_mask(facts, operand) and facts.kinds[operand] is Kind.SQUARE:
            if node.target is aten.add.Tensor and node.kwargs.get("alpha", 1) != 1:
                return None
            known = mask_facts(facts, operand)
            if known.understood and known.kind == "additive":
                return Support(operand)
    return None


def _hidden(facts: Facts, mask: Node) -> Support | None:
    """`masked_fill(scores, mask, -inf)` masks out where `mask` is true."""
    if mask.target in (aten.logical_not.default, aten.bitwise_not.default):
        return Support(mask.args[0])
    if facts.kinds[mask] is not Kind.SQUARE or any(m.mask is mask for m in facts.mixings.values()):
        return None  # already read the other way round, as what may be attended to
    facts.masks[mask] = _analyze(facts, mask, true_attends=False)
    return Support(mask)


KEEPS = {
    aten.to.dtype, aten.type_as.default, aten.clone.default, aten.contiguous.default, aten.view.default,
    aten.reshape.default, aten.dropout.default, aten.unsqueeze.default, aten.squeeze.dim,
}  # fmt: skip
KEEPS_ZERO = {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.neg.default}
assert set(pointwise_ops()) >= KEEPS_ZERO


def _scores_follow_their_reader(facts: Facts) -> None:
    """Scores read the columns that what is made of them keeps: the reach of their last reader.

    NOTE [scores]: a score that its softmax multiplies by exactly zero contributes nothing, forwards or
    backwards, so the columns of the scores need only reach as far as those of the product with the values.
    Any other use of a (row, column) value makes it FULL.
    """
    scores = [m for m in facts.mixings.values() if _has_columns(facts, m.node)]
    for mixing in scores:
        mixing.reach, mixing.window, mixing.mask = _reach_of_users(facts, mixing.node)


def _reach_of_users(facts: Facts, start: Node) -> tuple[Reach, Any, Node | None]:
    reach, window, mask = Reach.CONST, None, None
    pending, seen = [start], set()
    while pending:
        node = pending.pop()
        for user in node.users:
            if user in seen or user.op == "output":
                reach = Reach.FULL if user.op == "output" else reach
                continue
            seen.add(user)
            mixing = facts.mixings.get(user)
            if mixing is not None and not _has_columns(facts, user):
                if mixing.reach >= reach:
                    reach, window, mask = mixing.reach, mixing.window, mixing.mask
            elif facts.layouts.get(user) is not None and _has_columns(facts, user):
                pending.append(user)
            else:
                reach = Reach.FULL
    return reach, window, mask
