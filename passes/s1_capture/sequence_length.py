"""sequence_length: which sizes of a graph's inputs are the sequence length.

Found from the ops that read along the sequence (attention, softmax over keys, a convolution, a running sum)
back to the inputs whose size they read along, and never from the number of a dim. What cannot be told apart
is left alone, with a reason.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ..graph.facts import expression
from ..graph.ops.recurrence import RECURRENCE, RECURRENCES
from ..graph.sources import source_name
from ..graph.symbols import Lengths, values_of

NONE_READS = "no op of the graph reads along a dim that stands for the sequence length"
OPTION = 'name its dim with options={"seq_dim": {...}}'


class AmbiguousSequence(Exception):
    """Sizes of the inputs allow more than one reading."""


# Ops that read along a dim, by the name of the function or method: first those of attention, which decide
# where there are any; last products of values that are made of inputs, which are an attention where somebody
# wrote one without softmax: one of their dims is the sequence. Each gives (operand, dim) pairs.
def _attention(node: Node) -> list[tuple[Any, int]]:
    return [(_argument(node, 0, "query"), -2), (_argument(node, 1, "key"), -2)]


def _along_dim(node: Node) -> list[tuple[Any, int]]:
    dim = _argument(node, 1, "dim")
    return [(_argument(node, 0, "input"), dim)] if isinstance(dim, int) else []


def _along_last(node: Node) -> list[tuple[Any, int]]:
    return [(_argument(node, 0, "input"), -1)]


def _sequence_first(node: Node) -> list[tuple[Any, int]]:
    return [(_argument(node, 0, "query"), 0), (_argument(node, 1, "key"), 0)]


def _by_rows(node: Node) -> list[tuple[Any, int]]:
    """What goes by rows into PyTorch's `scan`."""
    return [(value, 0) for value in node.args[2]]  # type: ignore[union-attr]


def _recurrent(node: Node) -> list[tuple[Any, int]]:
    """What goes by rows into a recurrence."""
    name, operands = node.args[:2]
    dims = RECURRENCES[name].dims  # type: ignore[index]
    return [(x, dim) for x, dim in zip(operands, dims, strict=True) if dim is not None]  # type: ignore[arg-type]


def _product(node: Node) -> list[tuple[Any, int]]:
    operands = node.all_input_nodes[:2]
    if len(operands) < 2 or not all(_is_batch(n) and _is_made_of_inputs(n) for n in operands):
        return []
    return [(operands[0], -2), (operands[0], -1), (operands[1], -1)]


def _is_batch(node: Node) -> bool:
    """True for a value that is differentiated, and has dims beside those of a matrix."""
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.dim() > 2 and value.requires_grad


def _is_made_of_inputs(node: Node) -> bool:
    """True if an input that is no parameter goes into a value."""
    seen, pending = {node}, [node]
    while pending:
        node = pending.pop()
        value = node.meta.get("example_value") if node.op == "placeholder" else None
        if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
            return True
        new = set(node.all_input_nodes) - seen
        seen |= new
        pending += new
    return False


ATTENTION = {
    "scaled_dot_product_attention": _attention,
    "softmax": _along_dim,
    "flex_attention": _attention,
    "multi_head_attention_forward": _sequence_first,
}
PRODUCTS = {"matmul": _product, "bmm": _product, "einsum": _product}
SCANS = {
    "cumsum": _along_dim, "cumprod": _along_dim, "logcumsumexp": _along_dim, "conv1d": _along_last,
    "scan": _by_rows, RECURRENCE.__name__: _recurrent,
}  # fmt: skip


def find_lengths(
    module: GraphModule,
    seq_dim: Mapping[str, int] | None = None,
    values: Mapping[sympy.Symbol, int] | None = None,
    likely: Mapping[str, int] | None = None,
) -> Lengths:
    """Which symbols of a Dynamo graph are the sequence length.

    Args:
        module: the Dynamo graph; its placeholders carry `example_value`.
        seq_dim: dims by input name that are the sequence, whatever the graph says.
        values: of the symbols, in the call that is asked about; None: those of the trace.
        likely: dims by input name that are the sequence as a rule, the tokens first: those that are as long
            as what `seq_dim` names, or as the first of them.
    """
    inputs = _input_symbols(module, values or {})
    values = {s: h for _, dims in inputs.values() for s, h in dims.values()}
    try:
        found = _symbols_named(inputs, seq_dim or {})
        for name, dim in (likely or {}).items():
            sizes = {values[s] for s in found}
            more = _symbols_named(inputs, {name: dim})
            found |= {s for s in more if not found or values[s] in sizes}
        if not found and not seq_dim:
            found = _voted(module) & set(values)
        sizes = {values[s] for s in found}
        if len(sizes) > 1:
            raise AmbiguousSequence(f"its ops read along dims of different lengths, {sorted(sizes)}")
        if found:
            found |= _of_the_same_length(inputs, found, sizes.pop())
    except AmbiguousSequence as ambiguous:
        return Lengths(others=frozenset(values), values=values, reason=str(ambiguous))
    reason = None if found else made_a_number(module) or NONE_READS
    others = frozenset(values) - found
    samples = frozenset(
        dims[0][0] for _, dims in inputs.values() if {0, 1} <= set(dims) and dims[1][0] in found
    )
    longer = _longer(module, found)
    return Lengths(frozenset(found), others, samples & others, values, longer=longer, reason=reason)


def made_a_number(module: GraphModule) -> str | None:
    """The line at which a size along which ops read became a number, in words; None if there is none.

    NOTE [sizes that become numbers]: Dynamo makes a size a number where Python needs one (`math.log`), or an
    op does (`torch.linspace`). The graph is then one for that length, and has no sequence length.
    """
    read = lengths_read(module)
    values = [n.meta.get("example_value") for n in module.graph.nodes if n.op == "placeholder"]
    modes = {v.fake_mode for v in values if isinstance(v, FakeTensor)}
    for env in (mode.shape_env for mode in modes if mode.shape_env is not None):
        for symbol, place in getattr(env, "replacements_slocs", {}).items():
            number, line = env.replacements.get(symbol), getattr(place, "maybe_user_loc", None)
            if line is not None and number is not None and number.is_Integer and int(number) in read:
                code, _, where = " ".join(str(line).split()).rpartition(" # ")
                return (
                    f"the length {number} became a number when the graph was traced, which is then for that "
                    f"length alone: {where.rpartition('/')[2]}: {code.strip()}. (Where a function of "
                    "Python's needs it, a tensor does as well: torch.tensor(n).log().)"
                )
    return None


def _symbols_named(inputs: Mapping, seq_dim: Mapping[str, int]) -> set[sympy.Symbol]:
    return {s for n, (node, dims) in inputs.items() for s in _named(n, node, dims, seq_dim)}


def _longer(module: GraphModule, found: set[sympy.Symbol]) -> int:
    """By how much the inputs are longer than what the ops read along; 0 if that is no number from -1 on."""
    reads = [(expression(value.shape[dim]), value) for value, dim in _reads(module)]
    of_sequence = [
        e for e, v in reads if e.free_symbols and e.free_symbols <= found and not _is_extended(v, e)
    ]
    missing = {sympy.simplify(s - e) for e in of_sequence for s in e.free_symbols}
    (number,) = missing if len(missing) == 1 else (sympy.S.Zero,)
    return int(number) if number.is_Integer and number >= -1 else 0


def _is_extended(value: torch.Tensor, size: sympy.Expr) -> bool:
    """True for scores with more columns than rows (sinks): they do not say how long the sequence is."""
    others = (expression(s) for s in value.shape)
    return any(o != size and o.free_symbols == size.free_symbols for o in others)


def lengths_read(module: GraphModule) -> set[int]:
    """Sizes, as numbers, of the dims along which the graph's ops read."""
    return {_hint(size) for size in _sizes_read(module)}


def _input_symbols(
    module: GraphModule, values: Mapping[sympy.Symbol, int]
) -> dict[str, tuple[Node, dict[int, tuple[sympy.Symbol, int]]]]:
    """For each tensor input: its placeholder, and symbol and value of each dim that has a symbol."""
    found = {}
    for node in module.graph.nodes:
        value = node.meta.get("example_value") if node.op == "placeholder" else None
        if isinstance(value, torch.Tensor):
            dims = {
                d: (s, values.get(s, _hint(size)))
                for d, size in enumerate(value.shape)
                if isinstance(s := expression(size), sympy.Symbol)
            }
            found[node.name] = (node, dims)
    return found


def _named(
    name: str, node: Node, dims: Mapping[int, tuple[sympy.Symbol, int]], seq_dim: Mapping[str, int]
) -> Iterator[sympy.Symbol]:
    rank = node.meta["example_value"].dim()
    for wanted, dim in seq_dim.items():
        if is_called(node, wanted) and dim % rank in dims:
            yield dims[dim % rank][0]


def is_called(placeholder: Node, name: str) -> bool:
    """True if a user who says `name` means this input: an argument, or the last part of its path."""
    own = source_name(placeholder)
    return name in (own, own.split(".")[-1], placeholder.name)


def _voted(module: GraphModule) -> set[sympy.Symbol]:
    symbols: set[sympy.Symbol] = set()
    for size in _sizes_read(module):
        symbols |= expression(size).free_symbols if isinstance(size, torch.SymInt) else set()
    return symbols


def _sizes_read(module: GraphModule) -> list[Any]:
    return [value.shape[dim] for value, dim in _reads(module)]


def _reads(module: GraphModule) -> list[tuple[torch.Tensor, int]]:
    """Values that the graph's ops read along a dim, and the dim."""
    graphs = [m.graph for m in module.modules() if isinstance(m, GraphModule)]  # bodies of regions as well
    for table in (ATTENTION, SCANS, PRODUCTS):
        found: list[tuple[torch.Tensor, int]] = []
        for node in itertools.chain.from_iterable(g.nodes for g in graphs):
            rule = table.get(_name(node)) if node.op in ("call_function", "call_method") else None
            for operand, dim in rule(node) if rule is not None else ():
                value = operand.meta.get("example_value") if isinstance(operand, Node) else None
                # rows that are selected by their values are no sequence
                if isinstance(value, torch.Tensor) and value.dim() > 1 and not free_unbacked_symbols(value):
                    found.append((value, dim))
        if found:
            return found
    return []


def _of_the_same_length(inputs: Mapping, found: set[sympy.Symbol], length: int) -> set[sympy.Symbol]:
    """Symbols of further inputs with the value of the sequence length, where that tells them apart.

    NOTE [one sequence length]: Dynamo gives each input's length a symbol of its own, and they stay apart if
    the model never demands that they be equal. Here they are one; that they are equal in every later call
    is checked at run time.
    """
    apart = {
        s
        for _, dims in inputs.values()
        if any(t in found for t, _ in dims.values())
        for s, _ in dims.values()
    }
    more: set[sympy.Symbol] = set()
    for name, (_, dims) in inputs.items():
        symbols = [s for s, _ in dims.values()]
        if any(s in found for s in symbols):
            continue
        alike = [s for s, hint in dims.values() if hint == length and s not in apart]
        if len(alike) > 1:
            raise AmbiguousSequence(f"dims of the input {name!r} are equally long ({length}); {OPTION}")
        more.update(alike)
    return more


def _argument(node: Node, position: int, name: str) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name)


def _name(node: Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _hint(size: int | torch.SymInt) -> int:
    if not isinstance(size, torch.SymInt):
        return int(size)
    return int(size.node.expr.subs(values_of(size)))


def where_read(module: GraphModule, symbols: Sequence[sympy.Symbol]) -> list[tuple[int, int | None]]:
    """For each symbol an (input position, dim) where its value can be read; dim None for a number."""
    places: dict[sympy.Symbol, tuple[int, int | None]] = {}
    for position, node in enumerate(n for n in module.graph.nodes if n.op == "placeholder"):
        value = node.meta.get("example_value")
        if isinstance(value, torch.SymInt):
            places.setdefault(expression(value), (position, None))
        elif isinstance(value, torch.Tensor):
            for dim, size in enumerate(value.shape):
                places.setdefault(expression(size), (position, dim))
    return [places[s] for s in symbols]
