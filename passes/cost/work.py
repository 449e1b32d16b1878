"""work: what a program computes and moves, op by op, as expressions in the sizes.

NOTE [what takes time]: a step's time is taken to be a sum: operations of products, of attention and of its
backward, bytes that products and all other ops read and write, and a share for each op and each program that
is called; each over a rate of its own (`streambp_fx.planning.compute_rates`). A GPU is given its ops beside
its work, so there it is the longer of both. There is no rate for single shapes: that products of few rows are
slower is in the bytes of their weights. What this comes to beside measured steps is in docs/benchmarks.md and
docs/gpu.md. A list of ops that is incomplete makes it less exact and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ..graph.facts import expression, tensors_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Work:
    """What is computed and moved: numbers, or expressions in sizes.

    Attributes:
        products: floating-point operations of products, a multiplication and an addition counted as two.
        attention: those of attention's kernels, forwards.
        attention_backward: those of attention's kernels, backwards.
        product_bytes: bytes that products read and write: each operand and each result once.
        bytes: bytes that all other ops read and write, views apart.
        calls: how many ops are called, views apart.
        programs: how many programs are called.
    """

    products: Any = 0
    attention: Any = 0
    attention_backward: Any = 0
    product_bytes: Any = 0
    bytes: Any = 0
    calls: Any = 0
    programs: Any = 0

    @property
    def flops(self) -> Any:
        """Floating-point operations of products and attention; elementwise work is not counted, as in
        `torch.utils.flop_counter`."""
        return self.products + self.attention + self.attention_backward

    def map(self, function: Callable[[Any], Any]) -> Work:
        """The work whose parts are given by a function of each."""
        return Work(*map(function, self.parts))

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def parts(self) -> tuple[Any, ...]:
        """All of them, in order."""
        return tuple(getattr(self, f.name) for f in fields(self))

    @property
    def operations(self) -> Work:
        """The operations alone: what is asked for where sizes are symbols."""
        return Work(self.products, self.attention, self.attention_backward)


class CountedWork(TorchDispatchMode):
    """Adds up the work of what is called, in numbers.

    Attributes:
        work: so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.work = Work()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.is_view:
            return made
        tensors = [x for x in tree_leaves((args, kwargs, made)) if isinstance(x, Tensor)]
        moved, packet = sum(x.nbytes for x in tensors), func.overloadpacket
        if packet in flop_registry:
            operations = flop_registry[packet](*args, **(kwargs or {}), out_val=made)
            self.work += Work(products=operations, product_bytes=moved, calls=1)
        else:
            self.work += Work(bytes=moved, calls=1)
        return made


def total(parts: Iterable[Work]) -> Work:
    """All work together."""
    return sum(parts, Work())


def work_of_node(node: Node) -> Work:
    """The work of one node; none of a view, or of what is no op."""
    operations, size = flops_of(node), moved_bytes(node)
    if operations == 0:
        return Work() if size == 0 else Work(bytes=size, calls=sympy.S.One)
    kind = _kind(node)
    return Work(**{kind: operations}, product_bytes=size, calls=sympy.S.One)


def moved_bytes(node: Node) -> sympy.Expr:
    """Bytes that an op reads and writes: each operand and each result once, what is broadcast once.

    An op that looks rows up reads as many as it gives.
    """
    op = node.target
    if not isinstance(op, torch._ops.OpOverload) or op.is_view or op.overloadpacket in MOVES_NOTHING:
        return sympy.S.Zero
    made = sympy.Add(*map(_bytes, tensors_of(node)))
    if op.overloadpacket in LOOKS_UP:
        return 2 * made
    return made + sympy.Add(*(_bytes(v) for n in node.all_input_nodes for v in tensors_of(n)))


#: Ops that are no views by their schema and touch no memory; an op that is missing is counted.
MOVES_NOTHING = frozenset(
    {aten._unsafe_view, aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.sym_size}
)
#: Ops that read some rows of an operand; an op that is missing is taken to read all of it.
LOOKS_UP = frozenset({aten.embedding, aten.index, aten.gather, aten.index_select})


def _bytes(value: Tensor) -> sympy.Expr:
    """Bytes of the elements of a (fake) tensor of any shape and dtype, repeated ones once."""
    sizes = zip(value.shape, value.stride(), strict=True)
    distinct = (expression(size) for size, stride in sizes if not (isinstance(stride, int) and stride == 0))
    return sympy.Mul(*distinct) * value.element_size()


def _kind(node: Node) -> str:
    """Which operations a node's are, by the names that its schema gives to its arguments."""
    names = {a.name for a in node.target._schema.arguments}  # type: ignore[union-attr]
    if not {"query", "key"} <= names:
        return "products"
    return "attention_backward" if {"grad_out", "grad_out_"} & names else "attention"


# ---- floating-point operations

FLOPS: dict[str, Callable[[Node], Any]] = {}


def flops(*names: str) -> Callable:
    """Register the operations of ops, by their names, from a node; without it those that PyTorch counts."""

    def register(function: Callable[[Node], Any]) -> Callable[[Node], Any]:
        FLOPS.update(dict.fromkeys(names, function))
        return function

    return register


def flops_of(node: Node) -> sympy.Expr:
    """Floating-point operations of one node; 0 for ops without products."""
    op = node.target
    if not isinstance(op, torch._ops.OpOverload):
        return sympy.S.Zero
    if op._schema.name in FLOPS:
        return sympy.sympify(FLOPS[op._schema.name](node))
    if op.overloadpacket not in flop_registry or not tensors_of(node):
        return sympy.S.Zero
    value = lambda n: n.meta["val"]  # noqa: E731
    args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), value)
    return expression(flop_registry[op.overloadpacket](*args, **kwargs, out_val=node.meta["val"]))


def _shape(node: Any) -> tuple[sympy.Expr, ...]:
    return tuple(expression(s) for s in tensors_of(node)[0].shape)


@flops("aten::addmm_", "aten::addmm")
def _product(node: Node) -> sympy.Expr:
    """(n, k) @ (k, m) added to a buffer: 2 n k m."""
    left, right = _shape(node.args[1]), _shape(node.args[2])
    return 2 * left[0] * left[1] * right[1]


@flops("aten::_grouped_mm", "transformers::grouped_mm_fallback")
def _grouped_product(node: Node) -> sympy.Expr:
    """Each row, or each column, times the matrix of its group: 2 n k m, however the groups are."""
    return _grouped(_shape(node.args[0]), _shape(node.args[1]))


@flops("transformers::grouped_mm_fallback_backward")
def _grouped_product_backward(node: Node) -> sympy.Expr:
    """The gradients of both operands: as many each as the product."""
    return 2 * _grouped(_shape(node.args[0]), _shape(node.args[1]))


def _grouped(left: tuple[sympy.Expr, ...], right: tuple[sympy.Expr, ...]) -> sympy.Expr:
    once = 2 * sympy.Mul(*left) * right[-1]
    return once / left[0] if len(left) > len(right) else once  # each column meets one group's matrix


def _attention(node: Node) -> tuple[sympy.Expr, sympy.Expr, sympy.Expr]:
    """Scores that attention computes, and the head sizes of queries and values.

    Scores are rows x columns, half of them and half the diagonal if causal.
    """
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    (batch, heads, rows, size), columns = _shape(given["query"]), _shape(given["key"])[2]
    pairs = batch * heads * (rows * (rows + 1) / 2 if given.get("is_causal") else rows * columns)
    return pairs, size, _shape(given["value"])[3]


@flops(
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::scaled_dot_product_attention",
    "streambp_fx::block_attention",
    "streambp_fx::attend_to_others",
)
def _attention_forward(node: Node) -> sympy.Expr:
    """Scores and their product with the values: 2 D each a pair of row and column, for head sizes D."""
    pairs, of_query, of_value = _attention(node)
    return pairs * 2 * (of_query + of_value)


@flops(
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    "aten::_scaled_dot_product_flash_attention_backward",
    "aten::_scaled_dot_product_efficient_attention_backward",
    "streambp_fx::block_attention_backward",
    "streambp_fx::attend_to_others_backward",
)
def _attention_backward(node: Node) -> sympy.Expr:
    """Scores again, and four products with them (FlashAttention-2, arXiv 2307.08691, section 3.1)."""
    pairs, of_query, of_value = _attention(node)
    return pairs * 2 * (3 * of_query + 2 * of_value)
