"""What is known of values of rows and columns: an abstract value each.

NOTE [what is known of scores]: a score is *hidden* where a mask hides its row and column. Of the hidden
elements it is known that they are exactly zero, or minus infinity, or so low that the exponential of their
difference to a visible score is zero; or nothing is known. Every op that is to keep such knowledge has a
function in `score_rules` that is right for all its arguments. An op without one gives nothing. Scores before
they are masked, and parameters, are taken to be finite and far from the largest number of their dtype: what
is infinite or NaN in them may come out otherwise.

A derivative follows: elements that are zero here are made zero by an op whose derivative there is zero as
well (softmax, exp, sigmoid, relu, a product with zero, filling), and what is applied to them afterwards has a
finite derivative at zero.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..graph.facts import COLUMN_AXIS, ROW_AXIS, Facts, Kind, Mask, Reading, shape_of, tensors_of
from ..graph.op_arguments import arguments
from ..masks.analysis import MaskNotUnderstood, constant
from ..masks.facts import MaskFacts
from ..rules import normalize_dim, rule_of
from ..rules.pointwise import pointwise

aten = torch.ops.aten
# More rows than any window has.
CAUSAL = 2.0**60


class Hidden(enum.Enum):
    """What the hidden elements of a value are."""

    UNKNOWN = "unknown"
    ZERO = "zero"
    LOW = "low"  # at most half of finfo.min of the dtype in which they were masked, or minus infinity
    INFINITE = "minus infinity"


@dataclass(frozen=True)
class Score:
    """What is known of a value of rows and columns.

    Attributes:
        hidden: what its hidden elements are.
        parts: what hides them, see `Mask`.
        ordinary: visible elements are of ordinary size, or as large as the values in `parts` make them.
        finite: no element is infinite.
    """

    hidden: Hidden = Hidden.UNKNOWN
    parts: tuple[tuple[Node, Reading], ...] = ()
    ordinary: bool = True
    finite: bool = True

    @property
    def is_plain(self) -> bool:
        """True if visible elements are of ordinary size for certain, and not only if a bias is."""
        return self.ordinary and not (self.hidden is Hidden.UNKNOWN and self.parts)

    @property
    def is_masked_out(self) -> bool:
        """True if a softmax gives no weight to hidden elements."""
        return self.hidden is Hidden.INFINITE or (self.hidden is Hidden.LOW and self.ordinary)


ORDINARY = Score()
Call = dict[str, Any]
Transfer = Callable[["Scores", Node, Call], "Score | None"]
TRANSFER: dict[Any, Transfer] = {}


def transfer(*ops: Any) -> Callable[[Transfer], Transfer]:
    """Register what ops make of scores. The function returns None where nothing is known."""

    def register(function: Transfer) -> Transfer:
        for op in ops:
            assert op not in TRANSFER, f"two transfer functions for {op}"
            TRANSFER[op] = function
        return function

    return register


class Scores:
    """What is known of the values of a graph that have rows and columns.

    Args:
        facts: of the graph.
        known: what is proved of a mask.
    """

    def __init__(self, facts: Facts, known: Callable[[Mask], MaskFacts]) -> None:
        self.facts, self.known = facts, known
        self._of: dict[Node, Score] = {}
        # Values whose dims before rows and columns may have changed places since a mask was met.
        self._moved: set[Node] = set()
        self._is_moved = False  # an operand of the op that is being asked about

    def of(self, node: Any) -> Score | None:
        """What is known of a value; None if nothing is."""
        return self._of.get(node) if isinstance(node, Node) else None

    def visit(self, node: Node) -> None:
        """Derive what is known of a value from its operands."""
        if self.facts.kinds.get(node) is not Kind.STREAM or not self.facts.has_columns(node):
            return
        function = TRANSFER.get(node.target)
        if function is None and is_view(node):
            function = same_elements
        self._is_moved = any(n in self._moved for n in node.all_input_nodes)
        if self._is_moved or is_view(node):
            self._moved.add(node)
        found = function(self, node, arguments(node)) if function is not None else None
        if node in self.facts.biases:
            found = self._at_places(node)
        if found is not None and (self._is_upright(node) or self._is_known(node, found)):
            self._of[node] = found

    def _at_places(self, node: Node) -> Score:
        """What is known of a bias by place, see NOTE [places]: a parameter that is looked up is ordinary.

        Of others nothing: a trained factor may take from a mask what it hides. But minus infinity that is
        added to them hides.
        """
        looked_up = node.target in (aten.embedding.default, aten.index.Tensor)
        if looked_up and without_views(node.args[0]) in self.facts.parameters:
            return ORDINARY
        return Score(ordinary=False, finite=False)

    def _is_upright(self, node: Node) -> bool:
        """True if the last two dims of a value are rows and columns, as those of a mask are taken to be."""
        layout = self.facts.layouts.get(node) or ()
        return layout[-2:] == (ROW_AXIS, COLUMN_AXIS)

    def _is_known(self, node: Node, found: Score) -> bool:
        """True if nothing hides elements of a value that did not hide those of its operands.

        What hides them moves with rows and columns when a value is transposed; a mask that is met there
        would be read the wrong way.
        """
        before = {p for n in node.all_input_nodes if (known := self.of(n)) is not None for p in known.parts}
        return before.issuperset(found.parts)

    def is_data(self, node: Any) -> bool:
        """True for a value without a gradient that may differ from column to column."""
        return isinstance(node, Node) and self.facts.kinds.get(node) in (Kind.WHOLE, Kind.SQUARE)

    def number(self, value: Any) -> float | None:
        """A number, or the number that a value of one element always has."""
        if isinstance(value, (int, float)):
            return float(value)
        if self.is_data(value) and tensors_of(value) and tensors_of(value)[0].numel() == 1:
            try:
                return constant(value)
            except MaskNotUnderstood:
                return None
        return None

    def hides(self, *parts: tuple[Node, Reading]) -> MaskFacts | None:
        """What is proved of a mask, if it was understood."""
        found = self.known(Mask(parts))
        return found if found.understood else None

    def join(
        self, first: tuple[tuple[Node, Reading], ...], second: tuple[tuple[Node, Reading], ...]
    ) -> tuple[tuple[Node, Reading], ...] | None:
        """Both masks as one: None if their dims before rows and columns cannot be told to be the same."""
        parts = tuple(dict.fromkeys((*first, *second)))
        if len(parts) == max(len(first), len(second)):
            return parts
        leading = [size for n, _ in parts if math.prod(size := tuple(shape_of(n)[:-2])) != 1]
        alike = len(leading) <= 1 or (len(set(leading)) == 1 and not self._is_moved)
        return parts if alike and self.hides(*parts) is not None else None

    def width(self, parts: tuple[tuple[Node, Reading], ...]) -> float:
        """How many rows a row reads under a mask: those of its window; more than any; or infinity for all."""
        found = self.hides(*parts)
        if found is None or not found.causal:
            return math.inf
        return CAUSAL if found.window is None else float(found.window)

    def is_tight(self, parts: tuple[tuple[Node, Reading], ...]) -> bool:
        """True if the mask is proved to be causal."""
        return self.width(parts) < math.inf


# ---- which ops keep elements in their places


def is_view(node: Node) -> bool:
    """True for an op that returns its operand's elements under another shape, by its schema."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.returns or schema.is_mutable:
        return False
    given, made = schema.arguments, schema.returns
    alias = bool(given) and given[0].alias_info is not None and made[0].alias_info is not None
    operand = node.args[0] if node.args else None
    if not alias or not isinstance(operand, Node) or not tensors_of(operand) or not tensors_of(node):
        return False
    return tensors_of(operand)[0].dtype == tensors_of(node)[0].dtype


def without_views(node: Any) -> Any:
    """The value of which another one is a view, or a cast."""
    while isinstance(node, Node) and node.op == "call_function" and (is_view(node) or node.target in CASTS):
        node = node.args[0]
    return node


def is_elementwise(facts: Facts, node: Node) -> bool:
    """True for an op whose element at a row and a column is made of elements of that row and column."""
    if isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags:
        return True
    return is_view(node) or node.target in SAME_PLACES or rule_of(node.target) is pointwise


def normalised_dim(node: Node) -> int | None:
    """The dim of a softmax or log-softmax; None for other ops."""
    if node.target not in SOFTMAXES:
        return None
    return normalize_dim(arguments(node)["dim"], tensors_of(node)[0].dim())


SOFTMAXES = {
    aten.softmax.int, aten._softmax.default, aten._safe_softmax.default, aten.log_softmax.int,
    aten._log_softmax.default,
}  # fmt: skip
CASTS = (
    aten.to.dtype, aten.to.other, aten.to.device, aten.to.dtype_layout, aten._to_copy.default,
    aten.type_as.default, aten.clone.default, aten.contiguous.default, aten.reshape.default,
)  # fmt: skip
SAME_PLACES = {*CASTS, aten.dropout.default}


@transfer(*CASTS)
def same_elements(scores: Scores, node: Node, call: Call) -> Score | None:
    """Views, copies and casts between floating dtypes: zero stays zero, and what is low stays low.

    A number that is too low for the new dtype becomes minus infinity there, which is low as well.
    """
    known = scores.of(node.args[0])
    return known if known is not None and tensors_of(node)[0].is_floating_point() else None
