"""Op rules: how each op moves the sequence axis, and which of its operands it reads as columns.

A rule is a small function registered with `@rule(op, ...)`. It gets the node and a `RuleContext` and
returns the layout of the result; it raises `NotSeparable` with a reason when it cannot prove that rows
of the result are made of rows of the operands. An op without a rule is not separable. Rules are asked through
`asking.ask`, which also checks what holds for every op.
"""

from __future__ import annotations

from . import (  # noqa: F401  (register their rules)
    contractions,
    indexing,
    pointwise,
    quantised,
    random_numbers,
    recurrences,
    reductions,
    row_orders,
    row_selections,
    scatters,
    shapes,
)
from .registry import (
    RULES,
    Rule,
    RuleContext,
    forbid,
    merge_aligned,
    merge_axis,
    normalize_dim,
    places,
    rule,
    rule_for,
    rule_of,
)

__all__ = [
    "RULES",
    "Rule",
    "RuleContext",
    "forbid",
    "merge_aligned",
    "merge_axis",
    "normalize_dim",
    "places",
    "rule",
    "rule_for",
    "rule_of",
]
