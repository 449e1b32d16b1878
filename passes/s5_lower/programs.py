"""programs: the chunk programs of one distinct segment, each kind traced and lowered once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from ..graph.facts import Facts, Kind, Mask, PassError, Reach, Segment, expression, operands, tensors_of
from ..graph.op_arguments import sdpa_arguments
from ..graph.tracing import without_saved_tensors_hooks
from ..s2_prove.independent_samples import Samples, batch, batch_size
from ..s4_trace.chunk_program import ChunkProgram
from ..s4_trace.columns_of_others import NotByBlocks
from ..s4_trace.program_inputs import SIZES, SPECIAL, Extent, Slots, input_names
from ..s4_trace.vjp import FixedLength, Traced, outputs_of, traced_program
from ..step.build import Builder
from ..step.checker import check
from ..step.instructions import BY_COLUMNS, Buffer, BufferKind
from ..step.procedure import Procedure
from ..step.row_chunks import chunk_size
from ..step.saving import Price
from ..step.signature import PROGRAMS, Signature
from ..step.way import Way
from .lower import WRITES, Lowered, LoweringSettings, live_nodes, lower, restrict
from .saved_values import ForwardHalf, saved_values

#: Buffers that go into no program.
MADE = (BufferKind.OUTPUT, BufferKind.GRADIENT)


@dataclass
class Trace(Traced):
    """A traced program, and what was made of it.

    Attributes:
        lowered: programs, by kind and by what is saved.
        saved: what is saved for the backward at a price.
        half: what it computes before it reads a gradient, once that was asked for.
    """

    lowered: dict[tuple[str, Price | None], Lowered] = field(default_factory=dict)
    saved: dict[Price, list[Node]] = field(default_factory=dict)
    half: ForwardHalf | None = None


class SegmentPrograms:
    """The traced programs of one distinct segment, made when first needed.

    Kinds: `forward` (rows and outputs of a chunk), `states` (only the state rows: the rebuild before a
    backward), `columns` (the same without the states of recurrences, where those were kept), `joint`
    (recompute and VJP of a chunk), `loss` (values and VJP in one sweep) and, where reach is FULL,
    `state_joint` (VJP of the state rows, once their gradient is complete).

    NOTE [one trace, several programs]: tracing is what compiling costs. The joint program holds the forward
    of the chunk, the writing of its state rows and the VJP, so the other kinds are the joint trace with fewer
    outputs and without what is then dead.
    """

    def __init__(
        self,
        facts: Facts,
        segment: Segment,
        body: str = "eager",
        accumulate: str = "float32",
        pieces: int = 1,
    ) -> None:
        self.facts, self.segment, self.body, self.pieces = facts, segment, body, pieces
        self.wide = accumulate == "float32"
        self.traces: dict[tuple, list[Trace]] = {}
        self.states = ChunkProgram(facts, segment, segment.outputs, frozenset()).states
        self.symbols = sorted(_free_symbols(facts, segment), key=str)
        self._procedures: dict[tuple[str, Way], Procedure] = {}
        self._by_blocks: dict[tuple, bool] = {}
        self.diff_rows = [n for n in segment.rows if n in facts.needs_grad]
        self.diff_constants = [n for n in segment.constants if n in facts.needs_grad]
        self.diff_outputs = [n for n in segment.outputs if n in facts.needs_grad]

    @cached_property
    def samples(self) -> Samples | str:
        """Where the samples are in the segment, or why they are not known to be independent."""
        size = batch_size(self.facts)
        if size is None:
            return "the batch size is a number"
        return batch(self.facts, self.segment, size, list(self.states))

    @property
    def in_turn(self) -> bool:
        """True if rows on several devices wait for one another: some state is made of another state."""
        return self.segment.chained or any(s.by_chunk for s in self.states.values())

    def get(
        self,
        kind: str,
        plain: frozenset[Mask],
        extent: Extent,
        args: list[Any],
        price: Price | None = None,
    ) -> Lowered:
        """The program of a kind for these sizes, traced if there is none yet.

        Args:
            args: inputs in slot order; only the numbers at their front are looked at.
            price: at which values are saved by a forward, or were for another program.
        """
        source = self._source(kind, extent)
        traced = self.traced(source, plain, extent, args)
        if (kind, price) not in traced.lowered:
            saved = [] if price is None or source != "joint" else self.saved(traced, price)
            traced.lowered[kind, price] = self._lower(kind, source, traced, saved)
        return traced.lowered[kind, price]

    def saved(self, traced: Trace, price: Price) -> list[Node]:
        """The values of a joint trace that are saved at a price."""
        if price not in traced.saved:
            traced.saved[price] = saved_values(self.forward_half(traced), price)
        return traced.saved[price]

    def forward_half(self, traced: Trace) -> ForwardHalf:
        """What a joint trace computes before it reads a gradient, and what of it can be saved; found once."""
        if traced.half is None:
            traced.half = self._forward_half(traced)
        return traced.half

    def read_by_blocks(self, plain: frozenset[Mask], extent: Extent, args: list[Any]) -> bool:
        """True if chunks can read the columns of other devices block by block, see NOTE [columns in blocks].

        Args:
            plain: masks that hide nothing but later rows.
            extent: of a chunk, with columns of others.
            args: inputs in slot order; only the numbers at their front are looked at.

        Raises:
            PassError: the segment cannot be traced.
        """
        key = plain, extent.pattern
        if key not in self._by_blocks:
            self._by_blocks[key] = self._reads_plainly(plain)
            try:
                if self._by_blocks[key]:
                    self.traced("joint", plain, extent, args)
            except PassError as error:
                if not isinstance(error.cause, NotByBlocks):
                    raise
                self._by_blocks[key] = False
        return self._by_blocks[key]

    def _reads_plainly(self, plain: frozenset[Mask]) -> bool:
        """True if one causal attention without any other mask, and nothing else, reads columns."""
        segment, states = self.segment, self.states.values()
        simple = self.body == "eager" and bool(self.diff_outputs) and not segment.chained
        bounded = segment.window is not None or segment.reach is Reach.FULL
        if len(segment.mixings) != 1 or not simple or bounded or any(s.by_chunk or s.before for s in states):
            return False
        node = segment.mixings[0].node
        if node.target is not torch.ops.aten.scaled_dot_product_attention.default:
            return False
        call = sdpa_arguments(node)
        mask = call["attn_mask"]
        causal = call["is_causal"] or (isinstance(mask, Node) and Mask.of(mask) in plain)
        return causal and call["dropout_p"] == 0.0

    def _forward_half(self, traced: Trace) -> ForwardHalf:
        graph, kinds = traced.module.graph, (BufferKind.COTANGENT, BufferKind.STATE_GRADIENT, BufferKind.SUM)
        slots = self.slots("joint").tensors
        inputs = graph.find_nodes(op="placeholder")[-len(slots) :]
        gradients = (n for n, buffer in zip(inputs, slots, strict=True) if buffer.kind in kinds)
        results = {n for n in outputs_of(traced.module)[traced.values :] if isinstance(n, Node)}
        live = live_nodes(graph, results, unwanted=WRITES)
        return ForwardHalf.of(traced.module, live, gradients, traced.guards.names)

    def traced(self, source: str, plain: frozenset[Mask], extent: Extent, args: list[Any]) -> Trace:
        """The trace for these sizes, made if there is none yet.

        Raises:
            PassError: the segment cannot be traced.
        """
        others = args[len(SIZES) + 1 :][: len(self.symbols)]
        special = tuple(v if v in SPECIAL else None for v in others)
        found = self.traces.setdefault((source, plain, extent.pattern, special), [])
        sizes = dict(zip((*SIZES, *map(str, self.symbols)), (*extent.sizes, *others), strict=True))
        traced = next((t for t in found if t.accepts(sizes)), None)
        if traced is None:
            try:
                with without_saved_tensors_hooks():
                    traced = Trace(**vars(traced_program(self, source, plain, extent, args)))
            except PassError:
                raise
            except Exception as error:
                raise PassError("vjp", error) from error
            found.append(traced)
            if not traced.accepts(sizes):
                raise PassError("vjp", FixedLength("an op makes an ordinary number of the sequence length"))
        return traced

    def _source(self, kind: str, extent: Extent) -> str:
        """The trace that a kind is made of. See NOTE [one trace, several programs]."""
        if kind == "loss":
            return "joint"
        full = extent.full or self.segment.reach is Reach.FULL  # of the rows alone nothing but states is made
        shared = self.diff_outputs and not full
        return "joint" if shared and kind in ("forward", "states", "columns") else kind

    def reads_kept(self, kind: str) -> bool:
        """True if a program takes what the forward has saved (state rows need it only if chained)."""
        return kind == "joint" or (kind in ("states", "columns") and self.segment.chained)

    def _lower(self, kind: str, source: str, traced: Trace, saved: list[Node]) -> Lowered:
        slots, outputs = self.slots(kind), outputs_of(traced.module)
        sums = sum(b.kind is BufferKind.SUM for b in slots.tensors)
        names = input_names(slots)
        fakes, module = traced.fakes[: len(names)], traced.module
        if source == "joint":
            values, gradients = outputs[: traced.values], outputs[traced.values :]
            wanted = {"forward": [*values, *saved], "joint": gradients, "loss": outputs}
            given = saved if self.reads_kept(kind) else []
            place = len(names) - sums
            names[place:place] = [f"saved_{k}" for k in range(len(given))]
            fakes[place:place] = [n.meta["val"] for n in given]
            writes = kind in ("forward", "states", "columns")
            unwritten = _inputs_by_chunk(module, slots) if kind == "columns" else frozenset()
            inputs = len(names) - len(given)
            module = restrict(module, wanted.get(kind, []), inputs, writes, given, place, unwritten)
        window = None if self.segment.window is None else int(self.segment.window)
        settings = LoweringSettings(
            title=f"{kind} of segment {self.segment.index}",
            accumulators=sums,
            names=names,
            body=self.body,
            fakes=fakes,
            swept=kind == "loss",
            sizes=traced.guards.names,
            window=window,
        )
        try:
            return lower(module, settings)
        except PassError:
            raise
        except Exception as error:  # Inductor's, say
            raise PassError("lower", error) from error

    def procedure(self, name: str, way: Way) -> Procedure:
        """The instructions of a part of the segment's step, checked: they are made once for each way.

        Args:
            name: "forward", "backward", "loss" or "scaling".

        Raises:
            UnsoundProcedure: what was made is wrong.
        """
        key = name, way
        if key not in self._procedures:
            made = replace(getattr(Builder(self, way), name)(), signature=self.signature(way))
            check(made)
            self._procedures[key] = made
        return self._procedures[key]

    def signature(self, way: Way) -> Signature:
        """What the programs read and make, for the checker of procedures."""
        found = {kind: tuple(self.buffers(kind)) for kind in BufferKind if kind not in MADE}
        found[BufferKind.OUTPUT] = tuple(Buffer(BufferKind.OUTPUT, n) for n in self.segment.outputs)
        found[BufferKind.GRADIENT] = tuple(Buffer(BufferKind.GRADIENT, n) for n in self.diff_rows)
        kinds = {kind for own in PROGRAMS.values() for kind in own}
        slots = {k: (tuple(self.slots(k).tensors), tuple(self.slots(k, True).tensors)) for k in kinds}
        reads_kept = frozenset(filter(self.reads_kept, kinds))
        size = chunk_size(self.segment, way.together is not None)
        return Signature(way, found, slots, reads_kept, self.segment.chained, self.in_turn, size)

    def buffers(self, kind: BufferKind) -> list[Buffer]:
        """What goes into programs, of one kind."""
        segment, states = self.segment, self.states.values()
        if kind in BY_COLUMNS:
            wide = self.wide and kind is BufferKind.STATE_GRADIENT
            return [Buffer(kind, s.node, s.dim, wide, s.by_chunk) for s in states]
        if kind is BufferKind.SUM:
            return [Buffer(kind, n, wide=self.wide) for n in self.diff_constants]
        if kind is BufferKind.KEPT:
            return [Buffer(kind)]
        nodes = {
            BufferKind.ROWS: segment.rows,
            BufferKind.CONSTANT: segment.constants,
            BufferKind.WHOLE: segment.whole,
            BufferKind.COTANGENT: self.diff_outputs,
        }
        return [Buffer(kind, n) for n in nodes[kind]]

    def slots(self, kind: str, kept: bool = False) -> Slots:
        """What goes into a program of a kind, and in which order.

        Args:
            kept: what the chunk's forward has kept goes in as well.
        """
        backward, reads = kind in ("joint", "loss", "state_joint"), kind in ("joint", "loss")
        goes_in = {
            BufferKind.ROWS: True,
            BufferKind.CONSTANT: True,
            BufferKind.WHOLE: True,
            BufferKind.STATE: True,
            BufferKind.STATE_GRADIENT: backward,
            BufferKind.COTANGENT: reads,
            BufferKind.KEPT: kept,
            BufferKind.SUM: backward,
        }
        found = [buffer for k, wanted in goes_in.items() if wanted for buffer in self.buffers(k)]
        return Slots(self.symbols, found, self.segment.removed)


def _inputs_by_chunk(module: GraphModule, slots: Slots) -> frozenset[Node]:
    """Of the first inputs of a program, which are these, the states of recurrences."""
    inputs = module.graph.find_nodes(op="placeholder")[len(input_names(slots)) - len(slots.tensors) :]
    return frozenset(n for n, b in zip(inputs, slots.tensors, strict=False) if b.by_chunk)


def _free_symbols(facts: Facts, segment: Segment) -> set[sympy.Symbol]:
    """Size symbols of a segment other than the sequence length."""
    nodes = (*segment.nodes, *segment.rows, *segment.constants, *segment.whole)
    sizes = [size for n in nodes for value in tensors_of(n) for size in (*value.shape, *value.stride())]
    pending = [o for n in segment.nodes for o in operands(n) if facts.kinds[o] is Kind.SIZE]
    made_of: set[Node] = set()
    while pending:  # what is computed with sizes is computed again, see `evaluate_size`
        node = pending.pop()
        if node not in made_of:
            made_of.add(node)
            pending += [n for n in node.all_input_nodes if not tensors_of(n)]
    sizes += [n.meta["val"] for n in made_of]
    return {s for size in sizes for s in _symbols(size)} - {facts.sequence}


def _symbols(size: Any) -> set[sympy.Symbol]:
    return expression(size).free_symbols if isinstance(size, torch.SymInt) else set()
