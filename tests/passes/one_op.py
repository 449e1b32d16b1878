"""A graph of one op with the sequence in dims of its operands; what its rule claims against what it does.

Where the rule accepts, the op is run chunk by chunk by the code that the compiler uses (`chunk_program`,
`vjp`), and compared with the whole call: values and gradients.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from opdb_cases import Call
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_flatten, tree_unflatten

from streambp_fx.passes.graph.facts import (
    CapturedGraph,
    Facts,
    Kind,
    Reach,
    Role,
    Segment,
    expression,
    shape_of,
    tensors_of,
)
from streambp_fx.passes.graph.symbols import SymbolTable, new_fake_mode
from streambp_fx.passes.s2_prove.axes import axes
from streambp_fx.passes.s3_cut.segment import _judge, connect
from streambp_fx.passes.s4_trace import vjp
from streambp_fx.passes.s4_trace.carried_state import state_of_recurrence
from streambp_fx.passes.s4_trace.chunk_program import ChunkProgram
from streambp_fx.passes.s4_trace.evaluation import narrow
from streambp_fx.passes.s4_trace.program_inputs import Extent
from streambp_fx.passes.s5_lower.programs import SegmentPrograms
from streambp_fx.passes.step.instructions import BY_COLUMNS, Buffer, BufferKind

aten = torch.ops.aten
PLAIN, OUTER, INNER, SCORES = "plain", "outer", "inner", "scores"
OVER_COLUMNS = {
    aten.softmax.int, aten._softmax.default, aten._safe_softmax.default, aten.log_softmax.int,
    aten._log_softmax.default,
}  # fmt: skip


class Unsuited(Exception):
    """The sequence cannot be put there: the call is for one length only, or not legal."""


@dataclass(frozen=True)
class Carrier:
    """An operand with the sequence.

    Attributes:
        tensor: which of the tensors of a call.
        dim: which of its dims.
        form: what lies in the dim: the sequence; it and other entries, merged by a view; or the dim and the
            next are rows and columns of a product.
        factor: how many other entries.
    """

    tensor: int
    dim: int
    form: str = PLAIN
    factor: int = 1


@dataclass(frozen=True)
class Case:
    """A call, where the sequence is in it, and which of the carriers are data without a gradient."""

    call: Call
    length: int
    carriers: tuple[Carrier, ...]
    data: frozenset[int] = frozenset()
    sizes: tuple[int, ...] = ()

    def __str__(self) -> str:
        places = ", ".join(f"tensor {c.tensor} dim {c.dim} {c.form}" for c in self.carriers)
        return f"{self.call}: {self.length} rows in {places}; data {sorted(self.data)}; sizes {self.sizes}"


def tensors(call: Call) -> list[Tensor]:
    """The tensors of a call."""
    return [v for v in tree_flatten((call.args, call.kwargs))[0] if isinstance(v, Tensor)]


def cases(call: Call) -> Iterator[Case]:
    """Every way to put the sequence into a call that this harness knows."""
    given = tensors(call)
    single = [Carrier(k, d) for k, t in enumerate(given) for d in range(t.dim())]
    for carrier in single:
        size = given[carrier.tensor].shape[carrier.dim]
        yield from _variants(call, size, (carrier,))
        for factor in (f for f in (2, 3) if size % f == 0 and size // f > 1):
            for form in (OUTER, INNER):
                merged = Carrier(carrier.tensor, carrier.dim, form, factor)
                yield from _variants(call, size // factor, (merged,))
                yield from _aligned(call, given, size // factor, merged)
        yield from _aligned(call, given, size, carrier)
        shape = given[carrier.tensor].shape
        last = carrier.dim == len(shape) - 2
        if last and shape[-1] == shape[-2] and given[carrier.tensor].is_floating_point():
            scores = Carrier(carrier.tensor, carrier.dim, SCORES)
            yield from _variants(call, size, (scores,))
            yield from _aligned(call, given, size, scores)


def _aligned(call: Call, given: list[Tensor], length: int, carrier: Carrier) -> Iterator[Case]:
    """The sequence also in the others, where broadcasting or the same position puts it."""
    rank, size = given[carrier.tensor].dim(), given[carrier.tensor].shape[carrier.dim]
    for by_right in (True, False):
        found = [carrier]
        for k, other in enumerate(given):
            dim = carrier.dim - rank + other.dim() if by_right else carrier.dim
            if k != carrier.tensor and 0 <= dim < other.dim() and other.shape[dim] == size:
                scores = carrier.form == SCORES
                found.append(Carrier(k, dim, PLAIN if scores else carrier.form, carrier.factor))
        if len(found) > 1:
            yield from _variants(call, length, tuple(found))


def _variants(call: Call, length: int, carriers: tuple[Carrier, ...]) -> Iterator[Case]:
    """With and without a gradient of some carriers; sizes that may be made of the length are."""
    if length < 2:
        return
    numbers = size_leaves(call)
    multiples = [k for k, v in numbers.items() if v > 0 and v % length == 0]
    every = [tuple(c) for n in range(len(multiples) + 1) for c in itertools.combinations(multiples, n)][:16]
    kept = [frozenset[int]()]
    if len(carriers) > 1:
        kept += [frozenset({c.tensor for c in carriers[1:]}), frozenset({carriers[0].tensor})]
    if len(tensors(call)) > 1:
        first = carriers[0].tensor
        kept.append(frozenset(k for k in range(len(tensors(call))) if k != first))
    for sizes, data in itertools.product(every, dict.fromkeys(kept)):
        yield Case(call, length, carriers, data, sizes)


def size_leaves(call: Call) -> dict[int, int]:
    """The numbers among a call's leaves that may be sizes, by position."""
    schema = call.target._schema
    symbolic: set[int] = set()
    names = dict.fromkeys(re.findall(r"SymInt\S* (\w+)", str(schema)), True)
    leaves = tree_flatten((call.args, call.kwargs))[0]
    given = [a.name for a in schema.arguments[: len(call.args)]]
    position = 0
    for name, value in (*zip(given, call.args, strict=True), *call.kwargs.items()):
        count = len(tree_flatten(value)[0])
        if names.get(name):
            symbolic.update(range(position, position + count))
        position += count
    return {k: v for k, v in enumerate(leaves) if k in symbolic and type(v) is int}


@dataclass
class OneOp:
    """The graph of a case, and what the passes know of it.

    Attributes:
        inputs: the placeholders with their tensors.
        node: the op.
        results: what it gives, each a tensor.
    """

    case: Case
    facts: Facts
    inputs: dict[Node, Tensor]
    node: Node
    results: list[Node]
    expected: list[Tensor] = field(default_factory=list)

    @property
    def accepted(self) -> bool:
        known = self.facts.kinds[self.node] is Kind.STREAM and self.node not in self.facts.refusals
        return known and all(self.facts.layouts.get(n) is not None for n in self.results)


def build(case: Case) -> OneOp:
    """The graph of a case with a symbol for the length; Unsuited if the op does not allow one."""
    builder = _Builder(case)
    return builder.finish()


class _Builder:
    def __init__(self, case: Case) -> None:
        self.case = case
        self.mode = new_fake_mode()
        assert self.mode.shape_env is not None
        self.length = SymbolTable(self.mode.shape_env).new("length", case.length)
        self.symbol = expression(self.length)
        self.graph = Graph()
        self.inputs: dict[Node, Tensor] = {}
        self.captured = CapturedGraph(GraphModule({}, self.graph), sequence=self.symbol)
        self.captured.values = {self.symbol: case.length}
        self.size_node: Node | None = None
        carriers = {c.tensor: c for c in case.carriers}
        operands = [self.operand(t, k, carriers.get(k)) for k, t in enumerate(tensors(case.call))]
        leaves, spec = tree_flatten((case.call.args, case.call.kwargs))
        stream = iter(operands)
        given = [
            next(stream) if isinstance(v, Tensor) else self.number(v) if k in case.sizes else v
            for k, v in enumerate(leaves)
        ]
        args, kwargs = tree_unflatten(given, spec)
        self.node = self.call(case.call.target, *args, **kwargs)

    def placeholder(self, value: Tensor, shape: list[Any]) -> Node:
        node = self.graph.placeholder(f"input_{len(self.inputs)}")
        with self.mode:
            node.meta["val"] = torch.empty(shape, dtype=value.dtype)
        self.inputs[node] = value.detach().clone().contiguous()
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        node = self.graph.call_function(target, args, kwargs)
        values = torch.fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        for dispatcher in (
            enable_python_dispatcher,
            nullcontext,
        ):  # some ops know symbolic sizes in one alone
            try:
                with self.mode, dispatcher(), torch.no_grad():
                    node.meta["val"] = target(*values[0], **values[1])
                return node
            except Exception as error:
                cause = error
        raise Unsuited(str(cause)) from cause

    def number(self, value: int) -> Node:
        """A multiple of the length."""
        assert self.size_node is not None
        factor = value // self.case.length
        return self.size_node if factor == 1 else self.call(operator.mul, self.size_node, factor)

    def operand(self, value: Tensor, index: int, carrier: Carrier | None) -> Node:
        if carrier is None:
            node = self.placeholder(value, list(value.shape))
            if (value.is_floating_point() or value.is_complex()) and index not in self.case.data:
                self.captured.differentiable.add(node)
            return node
        length, dim, sizes = self.case.length, carrier.dim, list(value.shape)
        if carrier.form in (OUTER, INNER):
            outer = carrier.form == OUTER
            parts = (carrier.factor, length) if outer else (length, carrier.factor)
            dims = (carrier.factor, self.length) if outer else (self.length, carrier.factor)
            source = self.placeholder(value.unflatten(dim, parts), [*sizes[:dim], *dims, *sizes[dim + 1 :]])
            self.stream(source, index, dim + outer)
            size = self.call(operator.mul, self.size_node, carrier.factor)
            return self.call(aten.reshape.default, source, [*sizes[:dim], size, *sizes[dim + 1 :]])
        sizes[dim] = self.length
        source = self.placeholder(value, sizes)
        self.stream(source, index, dim)
        if carrier.form == SCORES:
            eye = self.placeholder(torch.eye(length, dtype=value.dtype), [length, self.length])
            return self.call(aten.matmul.default, source, eye)
        return source

    def stream(self, node: Node, index: int, dim: int) -> None:
        """Say whether an operand with the sequence is streamed or data; integers count as parameters."""
        value = self.inputs[node]
        if index not in self.case.data:
            floating = value.is_floating_point() or value.is_complex()
            if floating:
                self.captured.differentiable.add(node)
            else:
                self.captured.parameters[node] = node.name
        if self.size_node is None:
            self.size_node = self.call(aten.sym_size.int, node, dim)

    def finish(self) -> OneOp:
        value = self.node.meta["val"]
        several = isinstance(value, (tuple, list))
        results = [self.call(operator.getitem, self.node, k) for k in range(len(value))] if several else []
        results = results or [self.node]
        self.graph.output(tuple(results))
        env = self.mode.shape_env
        assert env is not None
        if env.replacements or self.symbol not in env.var_to_range:
            raise Unsuited("the op is for one length only")
        if not all(isinstance(n.meta["val"], Tensor) for n in results):
            raise Unsuited("it does not make tensors")
        # placeholders come first
        first = next(n for n in self.graph.nodes if n.op != "placeholder")
        for node in [n for n in self.graph.nodes if n.op == "placeholder"]:
            if first < node:
                first.prepend(node)
        self.captured.module = GraphModule({}, self.graph)
        nodes = {n.name: n for n in self.captured.module.graph.nodes}
        move = lambda n: nodes[n.name]  # noqa: E731
        self.captured.differentiable = {move(n) for n in self.captured.differentiable}
        self.captured.parameters = {move(n): v for n, v in self.captured.parameters.items()}
        facts = axes(self.captured)
        inputs = {move(n): v for n, v in self.inputs.items()}
        return OneOp(self.case, facts, inputs, move(self.node), [move(n) for n in results])


# ---- what the rule claims


def check(one: OneOp, traced: bool = False) -> bool:
    """Compare chunks with the whole of an accepted case; False if it holds nothing that runs by chunks."""
    assert_layouts(one)
    run = ChunkRun(one, traced)
    if not run.possible:
        return False
    run.compare()
    return True


def assert_layouts(one: OneOp) -> None:
    """Sizes are what the layouts say."""
    for node in one.results:
        layout, shape = one.facts.layouts[node], shape_of(node)
        assert layout is not None and len(layout) == len(shape), f"{one.case}: {layout} for {shape}"
        for axis, size in zip(layout, shape, strict=True):
            wanted = size if axis is None else axis.outer * (one.facts.sequence - axis.removed) * axis.inner
            assert sympy.expand(wanted - size) == 0, f"{one.case}: {axis} for size {size}"
            assert axis is not None or one.facts.sequence not in size.free_symbols, f"{one.case}: {size}"


def chunk_sizes(length: int) -> list[int]:
    """Uneven chunks, one of them of a single row."""
    return [1, 1] if length == 2 else [2, 1] if length == 3 else [2, 1, length - 3]


class ChunkRun:
    """A case as a segment, run whole and by chunks."""

    def __init__(self, one: OneOp, traced: bool) -> None:
        self.one, self.facts, self.traced = one, one.facts, traced
        self.length = one.case.length
        nodes = [n for n in one.facts.nodes if n.op == "call_function" and one.facts.kinds[n] is Kind.STREAM]
        self.piece = Segment(0, nodes)
        one.facts.segments = [self.piece]
        connect(one.facts, self.piece)
        # values of rows and columns leave no segment, but a chunk program can make them
        self.square = [n for n in one.results if _columns(one.facts, n)]
        _judge(one.facts, self.piece)
        bordered = self.piece.reason == "a value at its border cannot be stored by rows"
        self.possible = self.piece.chunked or (bordered and bool(self.square))
        self.possible = self.possible and one.node not in one.facts.slices
        if self.possible:
            self.owner = SegmentPrograms(one.facts, self.piece)
            self.full = bool(self.piece.mixings) and self.piece.reach is Reach.FULL

    # ---- whole

    def whole(self) -> tuple[list[Tensor], list[Tensor]]:
        """Values of all results and the gradients of what has one."""
        one = self.one
        leaves = {n: v.clone().requires_grad_(n in one.facts.differentiable) for n, v in one.inputs.items()}
        values: dict[Node, Any] = dict(leaves)
        for node in one.facts.nodes:
            if node.op == "call_function":
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                try:
                    values[node] = node.target(*args, **kwargs)
                except Exception as error:
                    raise Unsuited(str(error)) from error
        self.values = values
        outputs = [values[n] for n in one.results]
        self.differentiable = [n for n in one.inputs if n in one.facts.differentiable]
        self.cotangents = {n: _noise(v.detach()) for n, v in zip(one.results, outputs, strict=True)}
        roots = [
            (v, self.cotangents[n]) for n, v in zip(one.results, outputs, strict=True) if v.requires_grad
        ]
        wanted = [leaves[n] for n in self.differentiable]
        gradients: list[Tensor | None] = [None] * len(wanted)
        if roots and wanted:
            made, given = [v for v, _ in roots], [g for _, g in roots]
            try:
                gradients = list(torch.autograd.grad(made, wanted, given, allow_unused=True))
            except RuntimeError as error:
                raise Unsuited(str(error)) from error
        filled = [torch.zeros_like(w) if g is None else g for g, w in zip(gradients, wanted, strict=True)]
        # the gradient of rows is dense where they are streamed
        filled = [g.to_dense() if g.is_sparse else g for g in filled]
        return [v.detach() for v in outputs], filled

    # ---- by chunks

    def compare(self) -> None:
        values, gradients = self.whole()
        found, own = self.chunked()
        for k, (value, expected) in enumerate(zip(found, values, strict=True)):
            self.close(value, expected, f"result {k}")
        for node, expected in zip(self.differentiable, gradients, strict=True):
            self.close(own[node], expected, f"gradient of {node.name}")

    def close(self, value: Tensor, expected: Tensor, what: str) -> None:
        rough = expected.dtype in (torch.float32, torch.complex64)
        rtol, atol = (1e-5, 1e-6) if rough else (1e-9, 1e-11)
        message = lambda text: f"{what} of {self.one.case}\n{text}"  # noqa: E731
        torch.testing.assert_close(value, expected, rtol=rtol, atol=atol, equal_nan=True, msg=message)

    def axis(self, node: Node) -> tuple[int, Any] | None:
        layout = self.facts.layouts[node]
        assert layout is not None
        found = [(d, a) for d, a in enumerate(layout) if a is not None and a.role is Role.ROW]
        assert len(found) < 2
        return found[0] if found else None

    def rows(self, node: Node, value: Tensor, extent: Extent) -> Tensor:
        place = self.axis(node)
        assert place is not None
        return narrow(value, *place, extent.start, extent.rows, extent.total, int)

    def flat(self, kind: str, extent: Extent, buffers: dict[BufferKind, dict[Node, Tensor]]) -> list[Any]:
        slots = self.owner.slots(kind)
        assert not slots.symbols

        def given(buffer: Buffer) -> Tensor:
            assert buffer.node is not None
            if buffer.kind in buffers:
                own = buffers[buffer.kind][buffer.node]
                if buffer.by_chunk:
                    return own.narrow(0, self.starts.index(extent.start), 2)
                by_columns = buffer.kind in BY_COLUMNS
                return own.narrow(buffer.dim, extent.low, extent.columns) if by_columns else own
            if buffer.kind is BufferKind.COTANGENT:
                return self.rows(buffer.node, self.cotangents[buffer.node], extent)
            if buffer.kind is BufferKind.WHOLE:
                return self.values[buffer.node].detach()
            own = self.one.inputs[buffer.node]
            return self.rows(buffer.node, own, extent) if buffer.kind is BufferKind.ROWS else own

        return [*extent.sizes, 7, *map(given, slots.tensors)]

    def run(self, kind: str, extent: Extent, buffers: dict[BufferKind, dict[Node, Tensor]]) -> list[Tensor]:
        flat = self.flat(kind, extent, buffers)
        if self.traced and not self.square:
            return self.owner.get(kind, frozenset(), extent, flat).run(*flat)
        slots = self.owner.slots(kind)
        by_state = kind in ("states", "state_joint")
        targets = list(self.owner.states) if by_state else self.piece.outputs
        program = ChunkProgram(self.facts, self.piece, targets, frozenset())
        body = {"forward": vjp._forward, "states": vjp._write_states, "state_joint": vjp._state_joint}
        with torch.enable_grad():
            made = body.get(kind, vjp._joint)(self.owner, program, slots, extent, flat)
        sums = [b.node for b in slots.tensors if b.kind is BufferKind.SUM]
        if count := len(sums):
            for node, gradient in zip(sums, made[-count:], strict=True):
                buffers[BufferKind.SUM][node] += gradient
            made = made[:-count]
        return made[len(targets) :] if kind == "joint" else made

    def chunked(self) -> tuple[list[Tensor], dict[Node, Tensor]]:
        """Values of the results and gradients of what has one, chunk by chunk."""
        fill = lambda nodes: {n: _zeros(n, self.length) for n in nodes}  # noqa: E731
        states = list(self.owner.states)
        buffers = {kind: fill(states) for kind in (BufferKind.STATE, BufferKind.STATE_GRADIENT)}
        buffers[BufferKind.SUM] = fill(self.owner.diff_constants)
        extents, start = [], 0
        for rows in chunk_sizes(self.length):
            low, prefix = (0, start) if self.piece.mixings else (start, 0)
            extents.append(Extent(rows, prefix, low, self.length, self.full))
            start += rows
        self.starts = [e.start for e in extents]
        for node in (s.node for s in self.owner.states.values() if s.by_chunk):
            sizes, dtype = state_of_recurrence(node)
            for kind in (BufferKind.STATE, BufferKind.STATE_GRADIENT):
                buffers[kind][node] = torch.zeros([len(extents) + 1, *map(int, sizes)], dtype=dtype)
        if self.full and states:
            for extent in extents:
                self.run("states", extent.own(), buffers)
        parts = [self.run("forward", extent, buffers) for extent in extents]
        values = [self.joined(n, [p[k] for p in parts]) for k, n in enumerate(self.piece.outputs)]
        by_node = dict(zip(self.piece.outputs, values, strict=True))
        own = {n: torch.zeros_like(v) for n, v in self.one.inputs.items()}
        if self.owner.diff_outputs and (self.owner.diff_rows or self.owner.diff_constants):
            for extent in reversed(extents):
                self.add(own, extent, self.run("joint", extent, buffers))
            for extent in reversed(extents if self.full and states else []):
                if any(n in self.facts.needs_grad for n in states):
                    self.add(own, extent, self.run("state_joint", extent.own(), buffers))
        own.update(buffers[BufferKind.SUM])
        return [by_node[n] for n in self.one.results], own

    def add(self, own: dict[Node, Tensor], extent: Extent, gradients: list[Tensor]) -> None:
        for node, gradient in zip(self.owner.diff_rows, gradients, strict=True):
            self.rows(node, own[node], extent)  # the place exists
            place = self.axis(node)
            assert place is not None
            own[node].narrow(place[0], extent.start, extent.rows).add_(gradient)

    def joined(self, node: Node, parts: list[Tensor]) -> Tensor:
        place = self.axis(node)
        assert place is not None, f"{self.one.case}: a result without rows"
        dim, axis = place
        if axis.simple:
            return torch.cat(parts, dim)
        outer, inner = int(axis.outer), int(axis.inner)
        split = [p.unflatten(dim, (outer, -1, inner)) for p in parts]
        return torch.cat(split, dim + 1).flatten(dim, dim + 2)


def _columns(facts: Facts, node: Node) -> bool:
    return any(a is not None and a.role is Role.COLUMN for a in facts.layouts.get(node) or ())


def _zeros(node: Node, length: int) -> Tensor:
    sizes = [int(s.subs(dict.fromkeys(s.free_symbols, length))) for s in shape_of(node)]
    return torch.zeros(sizes, dtype=tensors_of(node)[0].dtype)


def _noise(value: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(value.numel())
    floating = value.is_floating_point() or value.is_complex()
    return torch.randn(value.shape, dtype=value.dtype, generator=generator) if floating else value
