"""What the passes know about a graph: kinds of values, sequence axes, mixing, segments."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node
from torch.utils._sympy.functions import FloorDiv

from ..several_devices import SeveralDevices


class Kind(enum.Enum):
    """How a value of the graph comes about, and so where it is computed."""

    SIZE = "size"  # an integer made of sizes: rebuilt wherever it is needed
    CONSTANT = "constant"  # depends on parameters but not on the sequence: rebuilt in each segment
    WHOLE = "whole"  # depends on no parameter, at most linear in the sequence: computed once, sliced
    SQUARE = "square"  # depends on no parameter, sequence x sequence (a mask): built block by block
    STREAM = "stream"  # depends on parameters and carries the sequence: streamed
    REDUCED = "reduced"  # made of streamed values, or a context, but does not carry the sequence


class Role(enum.Enum):
    """The part a sequence axis plays: rows are produced, columns are read (keys of an attention)."""

    ROW = "row"
    COLUMN = "column"


@dataclass(frozen=True)
class Axis:
    """A tensor dim that carries the sequence: its size is `outer * sequence length * inner`.

    `outer` and `inner` are 1 unless a view merged other dims into this one (`view(-1, vocabulary)`).
    `removed` counts rows that a slice took off (`logits[:, :-1]`): what follows is a sequence of its own.
    `order`, if it is not None, is the sort that says in which order the entries are; see `LocalValue`.
    """

    role: Role = Role.ROW
    outer: sympy.Expr = sympy.S.One
    inner: sympy.Expr = sympy.S.One
    removed: int = 0
    order: Node | None = None

    @property
    def simple(self) -> bool:
        """True if the dim holds the sequence and nothing else, in its order."""
        return self.outer == 1 and self.inner == 1 and self.order is None

    def size(self, length: Any, evaluate: Callable[[sympy.Expr], Any]) -> Any:
        """Size of the dim when `length` positions of the sequence are present."""
        return length if self.simple else evaluate(self.outer) * length * evaluate(self.inner)

    def __str__(self) -> str:
        name = self.role.value + (f"-{self.removed}" if self.removed else "")
        name = "*".join(str(p) for p in (self.outer, name, self.inner) if p != 1)
        return name if self.order is None else f"{name} sorted"


Layout = tuple[Axis | None, ...]


class Local(enum.Enum):
    """What a value is about that means something only beside the rows it was made of."""

    SORTED = "both results of a sort of rows"
    POSITIONS = "positions of rows"
    PLACES = "where rows have been sorted to"
    COUNTS = "how many rows have each key"
    ENDS = "where the rows of each key end among the sorted ones"


@dataclass(frozen=True)
class LocalValue:
    """A value that is made of all rows of a sort, and that a chunk makes of its own rows.

    NOTE [rows that are sorted]: a mixture of experts sorts its rows by expert, multiplies each by the
    weights of its expert, and sorts back. Which place a row has meanwhile depends on all rows, and what comes
    back for it on itself alone. So a chunk may sort by itself, if what it knows of the order (positions,
    counts) is used for nothing else. Ops that are given such a value have rules of their own
    (`rules/row_orders.py`), and what has none refuses it.

    Attributes:
        kind: what it is.
        order: the sort; of counts and ends, None.
        base: the axis of the rows that were counted, were sorted, or are pointed at.
        keys: the value that was counted or sorted.
        sorted_axis: of the rows in their order; not of counts and ends.
        selected: rows may be missing among them, see NOTE [selected rows] in `graph.ops.row_selection`.
    """

    kind: Local
    order: Node | None
    base: Axis
    keys: Node
    sorted_axis: Axis = Axis()
    selected: bool = False

    @property
    def covers(self) -> bool:
        """True if positions name each of the rows that they point at exactly once."""
        same = self.order is not None and replace(self.base, order=self.order) == self.sorted_axis
        return same and not self.selected


ROW_AXIS = Axis()
COLUMN_AXIS = Axis(Role.COLUMN)


class Reach(enum.IntEnum):
    """Which rows of a segment's input a row depends on; the greater includes the lesser."""

    CONST = 0
    ROW = 1  # [i, i]
    WINDOW = 2  # [i - w + 1, i]
    CAUSAL = 3  # [0, i]
    FULL = 4  # [0, T - 1]


class Reading(enum.Enum):
    """What an element of a mask says of a row and a column."""

    ATTENDS = "attends"  # bool: true attends; float: it is added to the scores
    HIDES = "hides"  # bool: true hides
    FACTOR = "factor"  # any dtype: the scores are multiplied by it, and zero hides


@dataclass(frozen=True)
class Mask:
    """What limits the columns that a row reads: it attends where every part lets it.

    Attributes:
        parts: values of rows and columns, without a gradient, and how each of them is read.
    """

    parts: tuple[tuple[Node, Reading], ...]

    @classmethod
    def of(cls, node: Node, reading: Reading = Reading.ATTENDS) -> Mask:
        """The mask that is one value."""
        return cls(((node, reading),))

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The values that the mask is made of."""
        return tuple(node for node, _ in self.parts)

    @property
    def name(self) -> str:
        """The names of its values, joined by "and", with how each is read where it is not simply a mask."""
        return " and ".join(n.name if r is Reading.ATTENDS else f"{r.value} {n.name}" for n, r in self.parts)


@dataclass
class Mixing:
    """A node whose output row reads other rows of its operands.

    Attributes:
        node: the op that reads its column operands.
        columns: operands whose rows are read as columns (keys and values).
        mask: what limits what is read, if there is something.
        reach: CAUSAL if `is_causal` is set, else FULL until the masks pass proves better.
    """

    node: Node
    columns: tuple[Node, ...]
    mask: Mask | None = None
    reach: Reach = Reach.FULL
    window: sympy.Expr | int | None = None

    @property
    def may_read_all(self) -> bool:
        """True if a row may read later rows: always, or in a step in which its mask leaves it nothing to see.

        Not so where PyTorch's own attention reads what a mask hides as minus infinity, see NOTE [rows that
        see nothing].
        """
        if self.reach is Reach.FULL or self.mask is None:
            return self.reach is Reach.FULL
        attention = torch.ops.aten.scaled_dot_product_attention.default
        boolean = all(tensors_of(n)[0].dtype == torch.bool for n in self.mask.nodes)
        return not (boolean and self.node.target is attention)


class PassError(Exception):
    """A pass failed.

    Attributes:
        name: which pass.
        cause: what it raised.
        node: the op it was at, if it was at one.
    """

    def __init__(self, name: str, cause: BaseException, node: Node | None = None) -> None:
        where = f" at {node.name} ({node.target})" if node is not None else ""
        super().__init__(f"pass {name!r} failed{where}: {type(cause).__name__}: {cause}")
        self.name, self.cause, self.node = name, cause, node


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a sum over chunks is held for values of a dtype: float32 for half precision."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


class NotSeparable(Exception):
    """An op rule found that rows of the result are not made of rows of the operands alone."""


@dataclass
class Facts:
    """Everything the passes have proved about one graph.

    `guards`, `values`, `sequence`, `parameters`, `differentiable`, `opaque`, `written`, `laid_out`, `asked`
    and `where_asked` are those of the captured graph.
    """

    module: GraphModule
    sequence: sympy.Symbol | None
    parameters: dict[Node, str]
    differentiable: set[Node]
    guards: list[sympy.Expr] = field(default_factory=list)
    values: dict[sympy.Symbol, int] = field(default_factory=dict)
    opaque: dict[Node, str] = field(default_factory=dict)
    written: list[Node] = field(default_factory=list)
    laid_out: set[Node] = field(default_factory=set)
    asked: list[Node] = field(default_factory=list)
    where_asked: dict[Node, frozenset[frozenset[int]]] = field(default_factory=dict)
    kinds: dict[Node, Kind] = field(default_factory=dict)
    layouts: dict[Node, Layout | None] = field(default_factory=dict)
    local: dict[Node, LocalValue] = field(default_factory=dict)
    mixings: dict[Node, Mixing] = field(default_factory=dict)
    refusals: dict[Node, str] = field(default_factory=dict)
    faults: dict[Node, str] = field(default_factory=dict)  # bugs of op rules, each taken for a refusal
    slices: set[Node] = field(default_factory=set)
    not_linear: set[Node] = field(default_factory=set)  # NOTE [backwards that are not linear]
    masks: dict[Mask, Any] = field(default_factory=dict)
    reach: dict[Node, Reach] = field(default_factory=dict)
    needs_grad: set[Node] = field(default_factory=set)
    sources: dict[Node, list[Node]] = field(default_factory=dict)  # operands to which a gradient comes
    segments: list[Segment] = field(default_factory=list)
    epilogue: list[Node] = field(default_factory=list)
    biases: set[Node] = field(default_factory=set)  # made of parameters and data alone: NOTE [places]
    lazy: dict[int, Node] = field(default_factory=dict)
    context: set[Node] = field(default_factory=set)  # of reduced values, those that no row goes into
    of_call: set[Node] = field(default_factory=set)  # not of the model alone
    placeless: bool = False  # the weights are on the meta device: where they will be is not known
    # parameters that are gathered together, each from pieces on several devices, before they are read
    parameter_groups: tuple[tuple[Node, ...], ...] = ()
    # of them those that the user asks not to gather again in the backward
    not_again_groups: frozenset[int] = frozenset()
    several: SeveralDevices | None = None  # what an engine of several devices does with parameters

    @property
    def nodes(self) -> list[Node]:
        """All nodes of the graph, in order."""
        return list(self.module.graph.nodes)

    @property
    def results(self) -> list[Any]:
        """What the graph returns: the model's outputs, the new values of `written`, then `asked`."""
        return list(self.module.graph.output_node().args[0])  # type: ignore[arg-type]

    @property
    def outputs(self) -> list[Any]:
        """What the model returns: nodes, numbers and None."""
        return self.results[: len(self.results) - len(self.written) - len(self.asked)]

    @property
    def new_values(self) -> list[Any]:
        """The results that are the new values of `written`."""
        count = len(self.outputs)
        return self.results[count : count + len(self.written)]

    def kind(self, node: Node) -> Kind:
        """The kind of a node; a KeyError if it has none yet."""
        return self.kinds[node]

    def carries(self, node: Node) -> bool:
        """True if a size of the value mentions the sequence length."""
        return self.degree(node) > 0

    def has_columns(self, node: Node) -> bool:
        """True if a dim of the value holds columns: scores of an attention, and its weights."""
        return any(a is not None and a.role is Role.COLUMN for a in self.layouts.get(node) or ())

    def trains(self, segment: Segment) -> bool:
        """True if a gradient reaches what a segment makes; not so for a teacher or a reference model."""
        return any(n in self.needs_grad for n in segment.outputs)

    def degree(self, node: Node) -> int:
        """In how many dims of the value the sequence length occurs."""
        if self.sequence is None:
            return 0
        return max((shape_degree(v, self.sequence) for v in tensors_of(node)), default=0)


@dataclass
class Segment:
    """A piece of the graph between two cut points; run chunk by chunk or, if it must be, whole.

    Attributes:
        nodes: streamed nodes in graph order.
        rows: streamed values (or graph inputs) that come in by rows.
        constants: parameters and other values without a sequence axis that a gradient may reach.
        whole: values without a gradient that are computed once and sliced.
        outputs: streamed values that later segments, the epilogue or the caller use.
        states: streamed values that mixing ops read as columns, kept for the whole segment.
        removed: rows that slices took off the sequence before this segment.
        chained: True if some state is made of what another mixing op of the segment reads.
        chunked: False if the segment runs unchunked; `reason` says why and `refused` names the op.
        is_behind: True for rows that were cut off a segment that runs unchunked, which is the one before.
    """

    index: int
    nodes: list[Node]
    rows: list[Node] = field(default_factory=list)
    constants: list[Node] = field(default_factory=list)
    whole: list[Node] = field(default_factory=list)
    outputs: list[Node] = field(default_factory=list)
    states: list[Node] = field(default_factory=list)
    mixings: list[Mixing] = field(default_factory=list)
    reach: Reach = Reach.ROW
    window: sympy.Expr | int | None = None
    chained: bool = False
    chunked: bool = True
    kind: str = "layer"
    reason: str | None = None
    refused: Node | None = None
    removed: int = 0
    signature: str = ""
    is_behind: bool = False

    def __repr__(self) -> str:
        return f"Segment({self.index}, {self.kind}, {len(self.nodes)} nodes)"


def tensors_of(node: Node) -> list[torch.Tensor]:
    """The fake tensors that a node produces, with the shapes (maybe symbolic) and dtypes of the capture."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    return [v for v in values if isinstance(v, torch.Tensor)]


def expression(size: int | torch.SymInt) -> sympy.Expr:
    """A size as a sympy expression; `s**2 // s`, which PyTorch leaves as it is, is `s`."""
    return _divided(size.node.expr) if isinstance(size, torch.SymInt) else sympy.Integer(size)


@functools.lru_cache(maxsize=2**16)
def _divided(size: sympy.Expr) -> sympy.Expr:
    def quotient(base: sympy.Expr, divisor: sympy.Expr) -> sympy.Expr:
        found = sympy.cancel(base / divisor)
        parts = sympy.Poly(found).coeffs() if found.free_symbols and found.is_polynomial() else [found]
        whole = all(c.is_Integer for c in parts)
        return found if whole else FloorDiv(base, divisor)

    return size.replace(FloorDiv, quotient) if size.has(FloorDiv) else size


def shape_of(node: Node) -> tuple[sympy.Expr, ...]:
    """Sizes of a node's (first) tensor as sympy expressions."""
    return tuple(expression(s) for s in tensors_of(node)[0].shape)


def shape_degree(tensor: torch.Tensor, sequence: sympy.Symbol) -> int:
    """Number of dims whose size mentions the sequence length, a square counted twice."""
    symbolic = (expression(s) for s in tensor.shape if isinstance(s, torch.SymInt))
    return sum(_degree(size, sequence) for size in symbolic)


@functools.lru_cache(maxsize=2**16)
def _degree(size: sympy.Expr, sequence: sympy.Symbol) -> int:
    if sequence not in size.free_symbols:
        return 0
    return max(1, int(sympy.degree(size, sequence)) if size.is_polynomial(sequence) else 1)


def operands(node: Node) -> list[Node]:
    """Nodes a node reads, in order, each once."""
    return list(dict.fromkeys(node.all_input_nodes))


@dataclass
class CapturedGraph:
    """One captured forward.

    Attributes:
        module: pre-dispatch ATen graph; every node has `meta["val"]` (a fake tensor or a SymInt).
        parameters: placeholders that are parameters of the model, with the name Dynamo gives them.
        differentiable: placeholders that require a gradient.
        autocast: True if autocast was on around the graph.
        sequence: the size symbol of the sequence length; None if the inputs have none, or several that
            nobody told apart.
        guards: what tracing assumed about the sizes; to be tested before the graph is used for others.
        values: of the size symbols, in the call for which the graph was captured.
        opaque: inputs that are no plain tensors (quantised weights), with the name of their class.
        written: placeholders of inputs that the model changes in place. Their new values are the graph's last
            outputs; the graph itself changes nothing.
        laid_out: placeholders that are taken to be contiguous, whatever the input is.
        asked: what branches on data ask, results without dims, bool; the last outputs, behind `written`.
        where_asked: placeholders that have a gradient only where all predicates of one of these sets hold, by
            their number in `asked`.
    """

    module: torch.fx.GraphModule
    parameters: dict[torch.fx.Node, str] = field(default_factory=dict)
    differentiable: set[torch.fx.Node] = field(default_factory=set)
    autocast: bool = False
    sequence: sympy.Symbol | None = None
    guards: list[sympy.Expr] = field(default_factory=list)
    values: dict[sympy.Symbol, int] = field(default_factory=dict)
    opaque: dict[torch.fx.Node, str] = field(default_factory=dict)
    written: list[torch.fx.Node] = field(default_factory=list)
    laid_out: set[torch.fx.Node] = field(default_factory=set)
    asked: list[torch.fx.Node] = field(default_factory=list)
    where_asked: dict[torch.fx.Node, frozenset[frozenset[int]]] = field(default_factory=dict)
