"""Asking a rule: what it says is checked against sizes and operands, and what else it raises is a bug.

NOTE [rules are checked]: a rule is written for the forms of an op that its author thought of. Three things
hold for every op and every form, so no rule has to see to them:

- a size that is made of the sequence length belongs to a dim that carries the sequence, and is the size that
  the axis says; else a chunk would be given the size for all rows;
- an operand that carries the sequence was looked at; else nobody knows what its rows are for;
- operands with rows have them in the same order.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import sympy
from torch.fx import Node

from ..graph.facts import Axis, Facts, Layout, NotSeparable, operands, shape_of, tensors_of
from . import Rule, RuleContext

STRICT = "STREAMBP_STRICT"
log = logging.getLogger("streambp_fx.passes")


class RuleFault(BaseException):
    """A rule raised something else than its refusal, where `STREAMBP_STRICT` is set (in tests).

    It is no `Exception`, so that what keeps a user's step from failing does not keep a test from failing.
    """


def ask(rule: Rule, context: RuleContext, node: Node) -> Layout:
    """The layout that a rule gives to the result of a node.

    Raises:
        NotSeparable: the rule refuses, or its answer cannot be right.
        RuleFault: the rule has a bug, and `STREAMBP_STRICT` is set. Else the bug is a refusal whose reason
            says that it is one, and is kept in `facts.faults`.
    """
    context.seen = set()
    try:
        layout = rule(context, node)
    except NotSeparable:
        raise
    except Exception as error:
        raise _fault(context.facts, node, f"raised {type(error).__name__}: {error}") from error
    _check_order(context.facts, node)
    rank = tensors_of(node)[0].dim()
    if len(layout) != rank:
        raise _fault(context.facts, node, f"gave {len(layout)} dims to a result of {rank}")
    check(context.facts, node, layout)
    for operand in operands(node):
        if operand not in context.seen and tensors_of(operand) and context.facts.carries(operand):
            raise NotSeparable(f"operand {operand.name} carries the sequence")
    return layout


def _check_order(facts: Facts, node: Node) -> None:
    """Check that all operands with rows have them in the same order; see NOTE [rows that are sorted].

    Rules let data have its rows where those of its partners are. Data is never sorted. Ops that are given
    something about an order see to it themselves.

    Raises:
        NotSeparable: some are sorted and others are not, or by something else.
    """
    carrying = [n for n in operands(node) if tensors_of(n) and facts.carries(n)]
    if any(n in facts.local for n in operands(node)):
        return
    orders = {
        next((a.order for a in facts.layouts.get(n) or () if a is not None and a.order is not None), None)
        for n in carrying
    }
    if len(orders) > 1:
        raise NotSeparable("rows that are sorted beside others that are not")


def check(facts: Facts, node: Node, layout: Layout) -> None:
    """Check that sizes and layout agree. See NOTE [rules are checked].

    Raises:
        NotSeparable: a dim of the result has other sizes than its layout says.
    """
    for dim, (axis, size) in enumerate(zip(layout, shape_of(node), strict=True)):
        if axis is None:
            if facts.sequence in size.free_symbols:
                raise NotSeparable(f"dim {dim} of the result has {size} entries, which are not its rows")
        elif not (axis.simple and not axis.removed and size == facts.sequence) and _differ(facts, axis, size):
            raise NotSeparable(f"dim {dim} of the result has {size} entries where {axis} was expected")


def _differ(facts: Facts, axis: Axis, size: sympy.Expr) -> bool:
    assert facts.sequence is not None
    wanted = axis.outer * (facts.sequence - axis.removed) * axis.inner
    return bool(sympy.expand(wanted - size) != 0)


def _fault(facts: Facts, node: Node, what: str) -> NotSeparable:
    name = op_name(node.target)
    text = f"a bug in streambp_fx: its rule for {name} {what}. Results are exact; please report it"
    if os.environ.get(STRICT, "0") not in ("", "0"):
        raise RuleFault(text)
    log.error("%s", text)
    facts.faults[node] = text
    return NotSeparable(text)


def op_name(target: Any) -> str:
    """What to call an op in a message."""
    return str(target) if hasattr(target, "_schema") else getattr(target, "__name__", str(target))
