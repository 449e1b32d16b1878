"""The registry of op rules: what a rule is given, what it may say, and how it refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
from torch.fx import Node

from ..graph.determinism import DETERMINISTIC
from ..graph.facts import (
    COLUMN_AXIS,
    ROW_AXIS,
    Axis,
    Facts,
    Kind,
    Layout,
    Local,
    LocalValue,
    Mixing,
    NotSeparable,
    Role,
    shape_of,
)

Rule = Callable[["RuleContext", Node], Layout]
RULES: dict[Any, Rule] = {}
LOCAL_RULES: dict[Any, Rule] = {}


def rule(*ops: Any) -> Callable[[Rule], Rule]:
    """Register a function as the rule of these ops; those of other packages by name, "package::op"."""

    def register(function: Rule) -> Rule:
        for op in ops:
            assert op not in RULES, f"two rules for {op}"
            RULES[op] = function
        DETERMINISTIC.update(ops)  # a rule says that rows are functions of rows
        return function

    return register


def local_rule(*ops: Any) -> Callable[[Rule], Rule]:
    """Register the rule of these ops where an operand is a `LocalValue`; see `row_orders`."""

    def register(function: Rule) -> Rule:
        for op in ops:
            assert op not in LOCAL_RULES, f"two local rules for {op}"
            LOCAL_RULES[op] = function
        DETERMINISTIC.update(ops)
        return function

    return register


def rule_of(target: Any) -> Rule | None:
    """The rule of what a node calls."""
    return _found(RULES, target)


def rule_for(facts: Facts, node: Node) -> Rule | None:
    """The rule of a node: where an operand is a `LocalValue`, that for such operands, and nothing else."""
    if any(n in facts.local for n in node.all_input_nodes):
        return _found(LOCAL_RULES, node.target) or _refuse_local
    return rule_of(node.target)


def _found(rules: dict[Any, Rule], target: Any) -> Rule | None:
    return rules.get(target) or rules.get(getattr(getattr(target, "_schema", None), "name", None))


def _refuse_local(ctx: RuleContext, node: Node) -> Layout:
    found = next(ctx.facts.local[n] for n in node.all_input_nodes if n in ctx.facts.local)
    raise NotSeparable(f"{node.target} is given {found.kind.value}")


class RuleContext:
    """What a rule may ask and say.

    Attributes:
        seen: operands that the rule that is being asked has looked at.
        places: True while a rule is asked of an op that is given no rows, see `places`.
    """

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.seen: set[Node] = set()
        self.places = False

    def rank(self, node: Node) -> int:
        """Number of dims of the value of a node."""
        return node.meta["val"].dim()

    def layout(self, node: Any) -> Layout:
        """Layout of an operand; operands without the sequence have no axis.

        Raises:
            NotSeparable: it is not known where the sequence is in the operand.
        """
        if not isinstance(node, Node):
            return ()
        self.seen.add(node)
        known = self.facts.layouts.get(node)
        if known is None and self.places and self.facts.kinds.get(node) is Kind.SQUARE:
            known = places(self.facts, node)
        if known is None:
            raise NotSeparable(f"the sequence axis of operand {node.name} is unknown")
        return known

    def ignores(self, node: Any) -> None:
        """Say that the values of an operand do not matter (it lends its dtype)."""
        self.seen.add(node)

    def mixes(self, mixing: Mixing) -> None:
        """Record that the op reads some operands by columns."""
        self.facts.mixings[mixing.node] = mixing


def places(facts: Facts, node: Node) -> Layout | None:
    """Rows and columns of data that has two dims of the size of the sequence symbol: in this order.

    NOTE [places]: data by itself has neither rows nor columns: its reader tells, by the dims that it aligns
    them with. An op of data and parameters alone has no such partner. As all of the data is there, either
    dim may be the one that is made by chunks. If what is made of it meets scores the other way round, that is
    refused there.
    """
    shape = shape_of(node)
    square = [d for d, size in enumerate(shape) if size == facts.sequence]
    others = (s for d, s in enumerate(shape) if d not in square)
    if len(square) != 2 or any(facts.sequence in s.free_symbols for s in others):
        return None
    axes = {square[0]: ROW_AXIS, square[1]: COLUMN_AXIS}
    return tuple(axes.get(d) for d in range(len(shape)))


def normalize_dim(dim: int, rank: int) -> int:
    """The index of a dim from the front, where -1 is the last one; 0 for a scalar."""
    return dim % rank if rank else 0


def forbid(layout: Layout, dims: list[int], what: str, role: Role | None = None) -> None:
    """Refuse an op that would touch the sequence.

    Args:
        layout: of an operand.
        dims: dims of it that may not carry the sequence.
        what: the beginning of the reason: what the op does.
        role: the only role that is forbidden; None: both.

    Raises:
        NotSeparable: one of these dims carries the sequence.
    """
    for dim in dims if layout else ():
        axis = layout[dim]
        if axis is not None and (role is None or axis.role is role):
            raise NotSeparable(f"{what} the sequence axis (dim {dim})")


def without(layout: Layout, dim: int) -> Layout:
    """A layout in which one of the dims carries nothing."""
    return (*layout[:dim], None, *layout[dim + 1 :]) if layout else layout


def merge_axis(first: Axis | None, second: Axis | None) -> Axis | None:
    """The common axis of two aligned dims, neither of size 1.

    Raises:
        NotSeparable: they carry different axes.
    """
    if first is not None and second is not None and first != second:
        raise NotSeparable(f"aligned dims carry different sequence axes ({first} and {second})")
    return first if first is not None else second


def merge_aligned(result: list[Axis | None], layout: Layout, shape: Sequence[sympy.Expr]) -> None:
    """Merge the axes of an operand into those of a broadcast, from the right; a dim of size 1 has none."""
    for offset in range(1, len(layout) + 1):
        axis = layout[-offset]
        if axis is not None and shape[-offset] != 1:
            result[-offset] = merge_axis(result[-offset], axis)


def about(ctx: RuleContext, node: Any, *kinds: Local) -> LocalValue:
    """What an operand says of an order.

    Raises:
        NotSeparable: nothing, or something else.
    """
    found = ctx.facts.local.get(node)
    if found is None or found.kind not in kinds:
        raise NotSeparable(f"an operand is not {' or '.join(k.value for k in kinds)}")
    ctx.seen.add(node)
    return found


def rows_of(ctx: RuleContext, node: Any) -> Layout:
    """The layout of an operand that says nothing of an order.

    Raises:
        NotSeparable: it does.
    """
    if node in ctx.facts.local:
        raise NotSeparable(f"an operand is {ctx.facts.local[node].kind.value}")
    return ctx.layout(node)
