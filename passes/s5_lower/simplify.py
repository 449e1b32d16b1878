"""simplify: the values of a traced program in fewer passes over memory, by algebra on its graph.

Where products are thin (low-rank adapters), an elementwise op on all rows of a chunk takes as long as one of
them. So sums and scalars go into the products next to them, and scalars to the narrowest value they may be
applied to.

NOTE [what a rewrite keeps]
- the value, up to the order in which it is rounded; in half precision nothing is rounded more often;
- its shape, strides and dtype, so that what reads it means what it meant: checked for every replacement;
- what is read from memory that some op of the program changes in place: no such read is moved;
- the peak: an operand is kept for longer only if it is smaller than what is not made any more;
- what a program of double precision computes in less: there a new order of rounding is all the error there is
  (5e-8 of a gradient, where the rest agrees to 1e-15), and who computes in double precision wants it gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from ..graph.facts import shape_of, tensors_of
from .rewriting import (
    FULL_PRECISION,
    SIMPLIFICATIONS,
    VIEWS,
    Program,
    dtype_of,
    evaluate,
    form,
    is_returned,
    is_smaller,
    is_view,
    simplification,
    storages,
)

aten = torch.ops.aten
MULTIPLES = (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.neg.default)
# Products by the arguments that are their factors.
FACTORS = {aten.mm.default: (0, 1)}
FACTORS |= dict.fromkeys((aten.addmm.default, aten.addmm_.default, aten.addmm.dtype_out), (1, 2))


def simplify(graph: Graph) -> None:
    """Rewrite a traced program in place, until no rule applies."""
    _fold_conjugates(graph)
    program = Program(graph)
    pending = True
    while pending:
        pending = False
        for node in list(graph.nodes):
            current: Node | None = node
            while current := _rewritten(program, current):
                pending = True
    _renew_views(graph)


def _rewritten(program: Program, node: Node) -> Node | None:
    """What a rule put in the place of a node; None if there is no rule for it."""
    if node._erased or node.target not in SIMPLIFICATIONS or not node.users or not tensors_of(node):
        return None
    if not program.stays(node, node):
        return None
    if program.is_double and dtype_of(node) != torch.float64:
        return None
    for function in SIMPLIFICATIONS[node.target]:
        new = function(program, node)
        if new is not None and program.replace(node, new):
            return new
    return None


# ---- sums


@simplification(aten.add.Tensor)
def sum_with_product(program: Program, node: Node) -> Node | None:
    """`x + s * (a @ b)` -> `addmm(x, a, b, alpha=s)`, also where the product is seen through views.

    It takes the place of the product, or, where x is made later, that of x.
    """
    if node.kwargs or not is_plain(node):
        return None
    left, right = node.args
    found = [(p, x) for x, p in ((left, right), (right, left)) if _summand(p) is not None]
    for operand, other in sorted(found, key=lambda pair: _inner(_summand(pair[0])[0])):  # type: ignore[index]
        product, factor = _summand(operand)  # type: ignore[misc]
        base = _matrix_of(other, product)
        if base is None or not program.stays(min(base, product), base, *product.args):
            continue
        if base < product:
            place = product
        elif _may_wait(product):
            place = base.next
        else:
            continue
        scale = {} if factor == 1 else {"alpha": factor}
        result = program.insert(place, node, aten.addmm.default, base, *product.args, **scale)
        if base is not other:
            result = program.insert(node, node, aten.view.default, result, other.args[1])
        return result
    return None


def _summand(node: Node) -> tuple[Node, float] | None:
    """The product that an operand of a sum is, and its factor, if nobody else reads it."""
    factor = 1.0
    while len(node.users) == 1 and (node.target in VIEWS or _multiple(node) is not None):
        own = _multiple(node)
        factor *= 1.0 if own is None else own
        node = node.args[0]  # type: ignore[assignment]
    return (node, factor) if node.target is aten.mm.default and len(node.users) == 1 else None


def _matrix_of(node: Node, product: Node) -> Node | None:
    """The matrix of a product's form that a value is a view of."""
    while node.target in VIEWS and shape_of(node) != shape_of(product):
        node = node.args[0]  # type: ignore[assignment]
    return node if form(node) == form(product) else None


def _inner(product: Node) -> float:
    """Length of the sums of a product; infinite if it is not a number."""
    size = shape_of(product.args[0])[1]
    return float(size) if size.is_Integer else float("inf")


def _may_wait(product: Node) -> bool:
    """True if the factors of a product may be kept for longer: a thin one and one that came from outside."""
    thin, given = product.args
    while given.target in (*VIEWS, aten.t.default):
        given = given.args[0]
    return given.op == "placeholder" and is_smaller(thin, product)


@simplification(aten.add.Tensor)
def sum_with_elementwise_product(program: Program, node: Node) -> Node | None:
    """`x + a * b` -> `addcmul(x, a, b)` in the place of the elementwise product."""
    if node.kwargs or not is_plain(node) or dtype_of(node) not in FULL_PRECISION:
        return None
    for other, product in (node.args, node.args[::-1]):
        if product.target is not aten.mul.Tensor or product.kwargs or len(product.users) != 1:
            continue
        factors = product.args
        if product < other or not all(isinstance(n, Node) and tensors_of(n) for n in factors):
            continue
        if program.stays(product, other) and all(form(n)[-2:] == form(node)[-2:] for n in factors):
            return program.insert(product, node, aten.addcmul.default, other, *factors)
    return None


@simplification(aten.add.Tensor)
def sum_of_slices(program: Program, node: Node) -> Node | None:
    """Gradients of the two parts of a tensor, each with zeros for the other: the parts, joined."""
    if node.kwargs or not is_plain(node):
        return None
    parts = sorted((_part(n) for n in node.args if _part(n) is not None), key=lambda p: p[1:3])
    if len(parts) != 2:
        return None
    (first, start, middle, size, dim), (second, again, end, _, other) = parts
    if dim != other or start != 0 or middle != again or end != size:
        return None
    if not program.stays(min(node.args), first, second):
        return None
    return program.insert(node, node, aten.cat.default, [first, second], dim)


def _part(node: Node) -> Any:
    """`(gradient, start, end, size, dim)` of a slice that zeros are put around, for this one reader."""
    if node.target is not aten.slice_backward.default or len(node.users) != 1:
        return None
    gradient, sizes, dim, start, end, step = node.args
    size = sizes[dim]
    if step != 1 or not all(isinstance(n, int) for n in (size, start, end)):
        return None
    return gradient, start, min(end, size), size, dim % len(sizes)


def is_plain(node: Node) -> bool:
    """True if an op of two operands reads two different values of its own shape and dtype."""
    first, second = node.args
    if not isinstance(first, Node) or not isinstance(second, Node) or first is second:
        return False
    if any(len(tensors_of(n)) != 1 or dtype_of(n) != dtype_of(node) for n in (first, second)):
        return False
    return shape_of(first) == shape_of(second) == shape_of(node)


# ---- scalars


def _multiple(node: Node) -> float | None:
    """The number by which an op multiplies its first operand, if that is what it does."""
    if node.target not in MULTIPLES or node.kwargs or not isinstance(node.args[0], Node):
        return None
    if dtype_of(node) != dtype_of(node.args[0]) or not dtype_of(node).is_floating_point:
        return None
    if node.target is aten.neg.default:
        return -1.0
    number = node.args[1]
    if not isinstance(number, (int, float)) or isinstance(number, bool):
        return None
    divides = node.target in (aten.div.Tensor, aten.div.Scalar)
    return float(number) if not divides else 1 / number if number else None


@simplification(aten.pow.Tensor_Scalar, *MULTIPLES)
def by_one(program: Program, node: Node) -> Node | None:
    """`x ** 1` and `x * 1` are x. What is returned stays a value of its own."""
    exponent = node.args[1] if node.target is aten.pow.Tensor_Scalar else _multiple(node)
    own = is_returned(node) or not program.stays(node, node.args[0])
    return node.args[0] if exponent == 1 and not own else None


@simplification(*MULTIPLES)
def scalar_into_products(program: Program, node: Node) -> Node | None:
    """`(g * s) @ w` -> `(g @ w) * s` where that is narrower, and `addmm(x, g * s, h)` with `alpha`.

    Only if nobody but products reads the multiple. In half precision only if the scalar is gone then.
    """
    factor, source = _multiple(node), node.args[0]
    if factor is None or form(source) != form(node) or not program.stays(node, source):
        return None
    readers = list(_readers(node))
    for reader, operand in readers:
        others = [a for k, a in enumerate(reader.args) if k not in FACTORS.get(reader.target, ())]
        if reader.target not in FACTORS or operand in others:
            return None
        scaled = reader.target is aten.mm.default
        if scaled and not (is_smaller(reader, source) and dtype_of(node) in FULL_PRECISION):
            return None
        if scaled and not program.stays(reader, reader):
            return None
    for reader, operand in readers:
        power = factor ** sum(reader.args[k] is operand for k in FACTORS[reader.target])
        if reader.target is aten.mm.default:
            multiple = program.insert(reader.next, node, aten.mul.Tensor, reader, power)
            reader.replace_all_uses_with(multiple, delete_user_cb=lambda user, own=multiple: user is not own)
        else:
            reader.kwargs = {**reader.kwargs, "alpha": reader.kwargs.get("alpha", 1) * power}
    return source


def _readers(node: Node) -> Iterator[tuple[Node, Node]]:
    """Those who read a value or a view of it, each with what it reads."""
    for user in node.users:
        if user.target in VIEWS or user.target is aten.t.default:
            yield from _readers(user)
        else:
            yield user, node


@simplification(aten.mul.Tensor)
def scalar_before_expand(program: Program, node: Node) -> Node | None:
    """`x * (expand(v) * s)` -> `x * expand(v * s)`: the same bits."""
    if node.kwargs or not is_plain(node):
        return None
    for wide, multiple in (node.args, node.args[::-1]):
        if _multiple(multiple) is None or len(multiple.users) != 1:
            continue
        spread = multiple.args[0]
        if spread.target is aten.expand.default and program.stays(multiple, spread):
            narrow = program.insert(node, node, multiple.target, spread.args[0], *multiple.args[1:])
            spread = program.insert(node, node, aten.expand.default, narrow, spread.args[1])
            return program.insert(node, node, aten.mul.Tensor, wide, spread)
    return None


@simplification(aten.mul.Tensor)
def scalar_to_expanded_factor(program: Program, node: Node) -> Node | None:
    """`(x * s) * expand(v)` -> `x * expand(v * s)`."""
    if node.kwargs or not is_plain(node) or dtype_of(node) not in FULL_PRECISION:
        return None
    for multiple, spread in (node.args, node.args[::-1]):
        factor = _multiple(multiple)
        if factor is None or len(multiple.users) != 1 or spread.target is not aten.expand.default:
            continue
        if program.stays(multiple, multiple.args[0]):
            narrow = program.insert(node, node, aten.mul.Tensor, spread.args[0], factor)
            spread = program.insert(node, node, aten.expand.default, narrow, spread.args[1])
            return program.insert(node, node, aten.mul.Tensor, multiple.args[0], spread)
    return None


# ---- views


@simplification(aten.t.default, *VIEWS)
def there_and_back(program: Program, node: Node) -> Node | None:
    """A view of a view that undoes it is the value. What is returned stays a value of its own."""
    seen = node.args[0]
    both = (seen.target in VIEWS and node.target in VIEWS) or seen.target is node.target is aten.t.default
    return seen.args[0] if both and form(seen.args[0]) == form(node) and not is_returned(node) else None


# ---- values


def _fold_conjugates(graph: Graph) -> None:
    """The conjugate of a number is a number; the derivative of a product with `1j` has one."""
    for node in graph.find_nodes(op="call_function", target=aten._conj.default):
        if isinstance(node.args[0], (int, float, complex)):
            put = lambda n, node=node: node.args[0].conjugate() if n is node else n  # noqa: E731
            for user in list(node.users):
                user.args = torch.fx.node.map_arg(user.args, put)
                user.kwargs = torch.fx.node.map_arg(user.kwargs, put)
            graph.erase_node(node)


def _renew_views(graph: Graph) -> None:
    """Views of values that have taken other places lie in their storages: `write_in_place` and the cost go by
    that.
    """
    for node in graph.nodes:
        own = storages(node) if is_view(node) else None
        if own is not None and (not own or not own <= storages(node.args[0])):
            evaluate(node)
