"""vjp: chunk programs and their joint vector-Jacobian products as explicit FX graphs.

Each program is traced once with `make_fx` on fake tensors whose chunk and prefix lengths are symbols, so
that one graph serves all chunks, all lengths and all identical segments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes

from ..graph.facts import Facts, Mask, Segment
from ..graph.ops.recurrence import RECURRENCE_STEP
from ..graph.symbols import SymbolTable, compiled, new_fake_mode
from ..graph.tracing import trace
from ..step.instructions import BufferKind
from . import chunk_ops, random_numbers  # noqa: F401  (register how ops are written)
from .carried_state import Ranges, State, StateReader
from .chunk_program import ChunkProgram
from .evaluation import evaluated
from .prefix_attention import StateRead
from .program_inputs import SIZES, Extent, FakeInputs, Slots, Unpacked
from .recurrence_rows import RecurrenceRows

Guard = Callable[[Mapping[str, int]], bool]
# Sizes that say where a chunk is.
CHUNK_SIZES = frozenset(SIZES) - {"total"}


class FixedLength(Exception):
    """A program would be right for one length of the sequence alone.

    PyTorch makes an ordinary number of the length, or of what is computed with it, where a formula of a
    derivative takes one: in that of `h ** (1 / h.shape[1])`, say.
    """


class Differentiable(Protocol):
    """A segment of which programs are traced.

    Attributes:
        facts, segment: the graph, and the part of it.
        states: what later chunks read, by node.
        diff_rows, diff_constants, diff_outputs: inputs by rows, others, and outputs that have a gradient.
        pieces: how many parts of a causal prefix are differentiated one after the other.
    """

    facts: Facts
    segment: Segment
    states: dict[Node, State]
    diff_rows: list[Node]
    diff_constants: list[Node]
    diff_outputs: list[Node]
    pieces: int

    def slots(self, kind: str) -> Slots:
        """What goes into a program of a kind, in order."""


@dataclass
class Traced:
    """A traced program before it is lowered.

    Attributes:
        module: its graph; the outputs are the values, then the gradients of rows, then those of parameters.
        values: how many outputs are values.
        guards: what tracing assumed of the sizes.
        fakes: the inputs it was traced with.
    """

    module: GraphModule
    values: int
    guards: Guards
    fakes: list[Any]

    def accepts(self, sizes: Mapping[str, int]) -> bool:
        """True if what tracing assumed holds for these sizes, given by name."""
        return all(guard(sizes) for guard in self.guards())


class Columns(StateReader):
    """Forward: own rows are written into the buffer, and the buffer is read."""

    def __init__(self, buffers: dict[Node, Tensor], ranges: Ranges, write: bool) -> None:
        self.buffers, self.ranges, self.write = buffers, ranges, write

    def columns(self, state: State, own: Tensor) -> Tensor:
        """The buffer of the state, into which the own rows are written first if `write` is set."""
        buffer = self.buffers[state.node]
        if self.write:
            buffer.narrow(state.dim, self.ranges.prefix, self.ranges.rows).copy_(own)
        return read_of(buffer, state, self.ranges)

    def recur(self, state: State, given: tuple, operands: list[Tensor | None]) -> Tensor:
        """Entry 0 of the buffer is the state before the chunk, entry 1 that after it."""
        before, after = self.buffers[state.node].unbind()
        name, _, settings, cast = given
        made, last = RECURRENCE_STEP(name, operands, settings, cast, before)
        after.copy_(last)
        return made


class DifferentiatedColumns(StateReader):
    """Causal: own rows are written; reads add to the gradient buffer and return the finished own rows."""

    def __init__(
        self, buffers: dict[Node, Tensor], grads: dict[Node, Tensor], ranges: Ranges, pieces: int
    ) -> None:
        self.buffers, self.grads, self.ranges, self.pieces = buffers, grads, ranges, pieces

    def columns(self, state: State, own: Tensor) -> Tensor:
        """The buffer of the state, with the own rows written; its backward is that of `StateRead`."""
        buffer, grad, own_grad = self.buffers_of(state)
        own_columns = buffer.narrow(state.dim, self.ranges.prefix, self.ranges.rows)
        read, read_grad = (read_of(x, state, self.ranges) for x in (buffer, grad))
        return StateRead.apply(own, read, own_columns, read_grad, own_grad)

    def recur(self, state: State, given: tuple, operands: list[Tensor | None]) -> Tensor:
        """As forwards; backwards the gradient of the state after the chunk becomes that of the one before."""
        states, gradients = self.buffers[state.node].unbind(), self.grads[state.node].unbind()
        name, _, settings, cast = given
        return RecurrenceRows.apply((name, settings, cast), *states, *gradients, *operands)

    def buffers_of(self, state: State) -> tuple[Tensor, Tensor, Tensor]:
        """The buffer of the state, that of its gradient, and the own rows of this one."""
        grad = self.grads[state.node]
        own = grad.narrow(state.dim, self.ranges.prefix, self.ranges.rows)
        return self.buffers[state.node], grad, own


class LeafColumns(StateReader):
    """Backward, not causal: the columns are leaves; the own rows are differentiated in a later sweep."""

    def __init__(self, leaves: dict[Node, Tensor], ranges: Ranges) -> None:
        self.leaves, self.ranges = leaves, ranges

    def columns(self, state: State, own: Tensor) -> Tensor:
        """The leaf tensor that stands for the columns of the state; the own rows are left alone."""
        return read_of(self.leaves[state.node], state, self.ranges)


def read_of(buffer: Tensor, state: State, ranges: Ranges) -> Tensor:
    """What a chunk reads of the buffer of a state: a view, of another size in the dim of the rows alone."""
    if state.before is None:
        return buffer
    before = state.columns_before(ranges)
    return buffer.narrow(state.dim, ranges.prefix - before, before + ranges.rows)


def traced_program(
    owner: Differentiable, kind: str, plain: frozenset[Mask], extent: Extent, args: list[Any]
) -> Traced:
    """Trace a program of a segment on fake tensors.

    Args:
        kind: see `SegmentPrograms`.
        plain: masks that hide nothing but later rows.
        extent: rows and columns of the chunk.
        args: inputs in slot order; only the numbers at their front are looked at.
    """
    facts, segment, slots = owner.facts, owner.segment, owner.slots(kind)
    mode = new_fake_mode()
    env = mode.shape_env
    assert env is not None
    fakes = FakeInputs(facts, slots, extent, SymbolTable(env), mode, args)
    by_state = kind in ("states", "state_joint")
    targets = list(owner.states) if by_state else segment.outputs
    program = ChunkProgram(facts, segment, targets, plain)
    bodies = {"forward": _forward, "states": _write_states, "state_joint": _state_joint}
    body = bodies.get(kind, _joint)

    def traced(*flat: Any) -> list[Tensor]:
        found = body(owner, program, slots, extent, flat)
        if program.origins is not None:
            program.origins.finish()
        return found

    with _disable_current_modes(), mode, torch.enable_grad():  # see NOTE [modes of a step]
        module = trace(traced, *fakes.flat)
    values = len(targets) if kind == "joint" else 0
    return Traced(module, values, Guards(env, fakes.names, extent), fakes.flat)


def outputs_of(module: GraphModule) -> list[Any]:
    """What a graph returns: nodes, numbers and None."""
    return list(next(n for n in reversed(module.graph.nodes) if n.op == "output").args[0])


def _forward(
    owner: Differentiable, program: ChunkProgram, slots: Slots, extent: Extent, flat: Any
) -> list[Tensor]:
    given = Unpacked(slots, extent, flat)
    with torch.no_grad():
        # in FULL reach all states were written before the first chunk reads
        reader = Columns(given.tensors[BufferKind.STATE], given.ranges, write=not extent.full)
        return evaluated(program, given.bindings(owner.facts), given.ranges, reader, given.seed)


def _write_states(
    owner: Differentiable, program: ChunkProgram, slots: Slots, extent: Extent, flat: Any
) -> list[Tensor]:
    given = Unpacked(slots, extent, flat)
    with torch.no_grad():
        reader = Columns(given.tensors[BufferKind.STATE], given.ranges, write=True)
        values = evaluated(program, given.bindings(owner.facts), given.ranges, reader, given.seed)
        for state, own in zip(owner.states.values(), values, strict=True):
            if not state.by_chunk:
                reader.columns(state, own)
        return []


def _joint(
    owner: Differentiable, program: ChunkProgram, slots: Slots, extent: Extent, flat: Any
) -> list[Tensor]:
    """Gradients of the chunk's rows, then of the parameters (which `lower` turns into accumulation).

    Before them come the outputs themselves.
    """
    given = Unpacked(slots, extent, flat)
    states, gradients = given.tensors[BufferKind.STATE], given.tensors[BufferKind.STATE_GRADIENT]
    leaves = list(states) if extent.full else []
    wanted = [*owner.diff_rows, *owner.diff_constants]

    def chunk(*primals: Tensor) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        named = dict(zip(wanted, primals, strict=False))
        if extent.full:
            columns = primals[len(wanted) :]
            reader: StateReader = LeafColumns(dict(zip(leaves, columns, strict=True)), given.ranges)
        else:
            reader = DifferentiatedColumns(states, gradients, given.ranges, owner.pieces)
        values = evaluated(program, given.bindings(owner.facts, named), given.ranges, reader, given.seed)
        by_node = dict(zip(program.targets, values, strict=True))
        return tuple(by_node[n] for n in owner.diff_outputs), values

    primals = [*_primals(owner, given), *(states[n] for n in leaves)]
    _, pullback, values = torch.func.vjp(chunk, *primals, has_aux=True)  # type: ignore[misc]
    cotangents = given.tensors[BufferKind.COTANGENT]
    found = _pull_back(pullback, [cotangents[n] for n in owner.diff_outputs])
    for node in reversed(leaves):
        gradients[node].add_(found.pop())
    return [*values, *found]


def _state_joint(
    owner: Differentiable, program: ChunkProgram, slots: Slots, extent: Extent, flat: Any
) -> list[Tensor]:
    given = Unpacked(slots, extent, flat)
    states, gradients = given.tensors[BufferKind.STATE], given.tensors[BufferKind.STATE_GRADIENT]
    wanted = [*owner.diff_rows, *owner.diff_constants]

    def chunk(*primals: Tensor) -> tuple[Tensor, ...]:
        bindings = given.bindings(owner.facts, dict(zip(wanted, primals, strict=True)))
        reader = LeafColumns(states, given.ranges)
        return tuple(evaluated(program, bindings, given.ranges, reader, given.seed))

    _, pullback = torch.func.vjp(chunk, *_primals(owner, given))  # type: ignore[misc]
    return _pull_back(pullback, [gradients[n].to(states[n].dtype) for n in owner.states])


def _primals(owner: Differentiable, given: Unpacked) -> list[Tensor]:
    """What is differentiated: rows, then constants."""
    rows, constants = given.tensors[BufferKind.ROWS], given.tensors[BufferKind.CONSTANT]
    return [*(rows[n] for n in owner.diff_rows), *(constants[n] for n in owner.diff_constants)]


def _pull_back(pullback: Callable[..., Any], cotangents: list[Tensor]) -> list[Tensor]:
    """Without a graph of the backward itself, PyTorch uses its fused backward kernels."""
    with torch.no_grad():
        return list(pullback(tuple(cotangents)))


class Guards:
    """What tracing (and Inductor, later) assumed about the sizes, as tests of sizes by name.

    Where the columns are all of the sequence, its length counts like any other size. Else it is not one of
    the program's, see NOTE [longer than the chunk needs], and what is assumed of it beside a chunk's place
    does not count: it is about views of buffers. What is assumed of it alone does, see `FixedLength`.

    Args:
        env: the sizes are symbols of this.
        names: of the sizes, by symbol.
        extent: the chunk that was traced.
    """

    def __init__(self, env: ShapeEnv, names: dict[sympy.Symbol, str], extent: Extent) -> None:
        self.env, self.names, self.full = env, names, extent.full
        symbols = {name: symbol for symbol, name in names.items()}
        self.place = [symbols.get("rows", extent.rows), symbols.get("prefix", extent.prefix)]
        self.seen = 0
        self.tests: list[Guard] = []

    def __call__(self) -> list[Guard]:
        for guard in self.env.guards[self.seen :]:
            if self._counts(guard.expr):
                symbols = sorted(guard.expr.free_symbols, key=str)
                test = compiled(symbols, guard.expr)
                self.tests.append(_guard(test, [self.names[s] for s in symbols]))
        self.seen = len(self.env.guards)
        return self.tests

    def conditions(self) -> list[sympy.Expr]:
        """What is tested, as expressions in the symbols of `names`, each once."""
        return list(dict.fromkeys(g.expr for g in self.env.guards if self._counts(g.expr)))

    def _counts(self, assumed: sympy.Expr) -> bool:
        known = [self.names.get(s) for s in assumed.free_symbols]
        of_views = bool(CHUNK_SIZES & set(known)) or self._is_end(assumed)
        ignored = "total" in known and of_views and not self.full
        return bool(known) and not ignored and None not in known and "seed" not in known

    def _is_end(self, assumed: sympy.Expr) -> bool:
        """True for the assumption that a buffer does not end where a chunk of such a place does."""
        if not isinstance(assumed, sympy.Ne) or len(assumed.free_symbols) != 1:
            return False
        (total,), difference = assumed.free_symbols, assumed.lhs - assumed.rhs
        is_linear = difference.is_polynomial(total) and sympy.degree(difference, total) == 1
        known = [
            self.env.replace(sympy.sympify(size)) for size in self.place
        ]  # tracing may make one a number
        numbers = [n for n in known if n.is_number]
        return is_linear and any(difference.subs(total, end) == 0 for end in (sum(numbers), *numbers))


def _guard(test: Callable[..., Any], names: list[str]) -> Guard:
    return lambda sizes: bool(test(*(sizes[n] for n in names)))
