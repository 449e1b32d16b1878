"""What was proved about a mask, as data and in words."""

from __future__ import annotations

from dataclasses import dataclass, field

import sympy
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational
from sympy.logic.boolalg import And, Boolean, Or
from torch import fx


@dataclass(frozen=True)
class Conjunct:
    """One of the conditions that a mask is the conjunction of.

    Attributes:
        kind: "causal" (exactly j <= i), "window" (exactly j > i - window), "data" (depends on the values of
            tensors) or "other" (depends on positions alone).
        predicate: the condition.
        window: the length of a window in rows, else None.
    """

    kind: str
    predicate: Boolean
    window: int | None = None

    def __str__(self) -> str:
        if self.kind in ("causal", "window"):
            return self.kind if self.window is None else f"window {self.window}"
        return _text(self.predicate)


@dataclass(frozen=True)
class MaskFacts:
    """What was proved about a mask. If `understood` is False nothing was, and `reason` says why.

    Attributes:
        node: the node of the mask.
        understood: the mask was evaluated to a predicate.
        reason: why it was not, in one line.
        kind: "bool" (a choice), "additive" (a float that is added to the scores) or "factor" (that the scores
            are multiplied by). A mask of several parts is additive if one of them is.
        predicate: row i attends to column j. Additive: the value is not masked, that is, above finfo.min / 2.
        causal: proved that the predicate implies j <= i.
        window: smallest w for which the predicate is proved to imply j > i - w; None if there is none.
        plain: the predicate is exactly j <= i, and nothing is added to attended scores.
        has_bias: a value other than zero is added to attended scores (ALiBi).
        conjuncts: the conditions one by one.
        plain_without_data: without the data conjuncts, the predicate is exactly j <= i; and there is no bias.
        infinite: what is hidden is minus infinity everywhere, not a finite number; for an additive mask.
        finite: no element is infinite; for a factor.
        linear: linear nodes that the predicate or the bias reads, by the name of the function in their place.
        bias: the unknown values added to attended scores, as applications of such functions.
        bounds: what holds for i and j.
    """

    node: fx.Node
    understood: bool
    reason: str = ""
    kind: str = "bool"
    predicate: Boolean = sympy.true
    causal: bool = False
    window: int | None = None
    plain: bool = False
    has_bias: bool = False
    conjuncts: tuple[Conjunct, ...] = ()
    plain_without_data: bool = False
    infinite: bool = False
    finite: bool = False
    linear: dict[str, fx.Node] = field(default_factory=dict, compare=False, repr=False)
    bias: tuple[sympy.Expr, ...] = ()
    bounds: tuple[Boolean, ...] = ()

    def describe(self) -> str:
        """One readable line, such as `causal and padding[b, j]`."""
        if not self.understood:
            return f"not understood: {self.reason}"
        text = " and ".join(map(str, self.conjuncts)) or "every column"
        if self.has_bias:
            text += f", plus {', '.join(map(_text, self.bias)) or 'a constant'}"
        return text

    def __str__(self) -> str:
        return self.describe()


def _text(expr: sympy.Basic) -> str:
    """`f[b, j]` for applications, `f[b, j]` and `not f[b, j]` for tests of them against zero."""
    if isinstance(expr, AppliedUndef):
        return f"{expr.func.__name__}[{', '.join(map(_text, expr.args))}]"
    if isinstance(expr, (sympy.Ne, sympy.Eq)) and isinstance(expr.lhs, AppliedUndef) and expr.rhs == 0:
        return ("not " if isinstance(expr, sympy.Eq) else "") + _text(expr.lhs)
    if isinstance(expr, (And, Or)):
        return "(" + (" and " if isinstance(expr, And) else " or ").join(map(_text, expr.args)) + ")"
    if isinstance(expr, Relational):
        return f"{_text(expr.lhs)} {expr.rel_op} {_text(expr.rhs)}"
    names = {f: sympy.Symbol(_text(f)) for f in expr.atoms(AppliedUndef)}
    return str(expr.xreplace(names))
