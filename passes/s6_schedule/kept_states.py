"""keep_states: states of recurrences are kept from the forward to the backward, where they are small.

The forward of a chunk leaves the state that the next chunk begins with. Without it the backward of a segment
begins with a sweep that runs the recurrence over all rows once more. Where the states before all chunks take
little memory beside what is stored of their rows anyway, they are kept, and that sweep makes no more than the
rows that later chunks read (those of a convolution, or keys and values).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

import sympy

from ..graph.facts import Facts, shape_of, tensors_of
from ..s4_trace.carried_state import state_of_recurrence
from ..s5_lower.programs import SegmentPrograms
from ..step.instructions import Buffer, BufferKind
from .program import Call, StepInstruction, StepProgram
from .program.values import Value, ValueKind
from .step_parts import StepParts

#: Of what is stored of a segment's rows, the part that its states may take in addition.
SMALL = Fraction(1, 4)


def segments_with_small_states(
    parts: StepParts, rows: int, sizes: Mapping[sympy.Symbol, int]
) -> frozenset[int]:
    """Indices of the segments whose states of recurrences are kept in a step of these sizes.

    None of a policy that spares what is stored, or has it lie elsewhere, and none where chunks go through
    several layers each, which keeps all states.

    Args:
        rows: of a chunk.
        sizes: of all size symbols of the graph, the sequence length among them.
    """
    policy, found = parts.policy, dict[int, bool]()
    if policy.every > 1 or policy.order == "chunks" or parts.moves:
        return frozenset()
    for own in parts.segments:
        if isinstance(own, SegmentPrograms) and id(own) not in found:
            found[id(own)] = _are_small(own, rows, sizes)
    return frozenset(k for k, own in enumerate(parts.segments) if found.get(id(own), False))


def _are_small(programs: SegmentPrograms, rows: int, sizes: Mapping[sympy.Symbol, int]) -> bool:
    segment, sequence = programs.segment, programs.facts.sequence
    states = [s.node for s in programs.states.values() if s.by_chunk]
    if not states or sequence is None:
        return False
    chunks = -(-(sizes[sequence] - segment.removed) // rows)
    kinds = ((shape, dtype.itemsize) for shape, dtype in map(state_of_recurrence, states))
    stored = ((shape_of(n), tensors_of(n)[0].element_size()) for n in segment.rows)
    return (chunks + 1) * _bytes(kinds, sizes) <= SMALL * _bytes(stored, sizes)


def _bytes(values: Iterable[tuple[Sequence[sympy.Expr], int]], sizes: Mapping[sympy.Symbol, int]) -> int:
    """Of values with these shapes and bytes an element."""
    return sum(int(sympy.Mul(*shape).subs(sizes)) * size for shape, size in values)


def keep_states(program: StepProgram, parts: StepParts, segments: frozenset[int]) -> StepProgram:
    """The forwards of these segments hand over the states of recurrences, and their backwards take them.

    Not of a segment that has no backward, in which some row may read all rows, or which is run again.
    """
    back = {i.segment for i in program.backward if isinstance(i, Call) and i.procedure_name == "backward"}
    ran = {i.segment for i in program.forward if isinstance(i, Call)}
    keeping = segments & back & ran

    def changed(instruction: StepInstruction) -> StepInstruction:
        ours = isinstance(instruction, Call) and instruction.segment in keeping and not instruction.way.full
        return _keeping(instruction, parts.facts) if ours else instruction  # type: ignore[arg-type]

    return program.with_parts(map(changed, program.forward), map(changed, program.backward))


def _keeping(call: Call, facts: Facts) -> Call:
    states = tuple(v for b, v in values_of_states(call, facts).items() if b.by_chunk)
    made = replace(call, way=replace(call.way, keeps_states=True))
    if call.procedure_name == "forward":
        return replace(made, results=(*call.results, *states))
    return replace(made, inputs=(*call.inputs, *states))


def values_of_states(call: Call, facts: Facts) -> dict[Buffer, Value]:
    """What the states of a call's programs are in the step, where they are kept for the backward."""
    model, own = call.programs.segment, facts.segments[call.segment]
    # what comes in as rows may be a state as well
    twins = dict(zip((*model.rows, *model.nodes), (*own.rows, *own.nodes), strict=True))
    states = call.programs.buffers(BufferKind.STATE)
    return {b: Value(ValueKind.STATE, twins[b.node]) for b in states if b.node is not None}
