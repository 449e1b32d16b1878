"""run_chunks_first: each chunk goes through neighbouring layers before the next chunk does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..graph.facts import Facts
from ..s3_cut.alive_bytes import row_axis
from ..step.instructions import Buffer, BufferKind
from ..step.saving import Price, everywhere
from .build import written_over
from .kept_states import values_of_states
from .program import Call, CallLoss, ChunksFirst, StepInstruction, StepProgram, read_from_outside, segment_of
from .program.values import Value, ValueKind
from .step_parts import StepParts

OTHERS_READ = "what it reads is more than rows, or is read by others, too"
#: Between its two halves all of a chunk is kept that costs more than elementwise work to compute again.
CHUNK = Price(64.0, 0)


def run_chunks_first(program: StepProgram, parts: StepParts) -> StepProgram:
    """Runs of segments that hand on nothing but rows have one loop over chunks together.

    Kept for the backward are their states, and not the rows between them.
    """
    backward = {i.segment: i for i in program.backward if isinstance(i, Call)}
    for chain in list(_chains(program, parts, backward)):
        loop = _Loop(parts.facts, chain, backward)
        differentiated = [backward[c.segment] for c in reversed(chain) if c.segment in backward]
        program = program.with_parts(
            _replaced(program.forward, chain, loop.forward()),
            _replaced(program.backward, differentiated, loop.backward()),
        )
    return program


def why_apart(program: StepProgram, parts: StepParts) -> dict[int, str]:
    """Of trained segments that read along the sequence, those that are not in one loop with the one before.

    Args:
        program: as it is before `run_chunks_first`.

    Returns:
        why, by index.
    """
    facts, found = parts.facts, dict[int, str]()
    backward = {i.segment: i for i in program.backward if isinstance(i, Call)}
    shared, before, why = _shared_states(program, facts), None, ""
    seen = False
    for instruction in program.forward:
        index = segment_of(instruction)
        if index is None:
            continue
        why = why or _why_cut(program, facts, before, instruction, backward, shared)
        if facts.segments[index].mixings and facts.trains(facts.segments[index]):
            if seen and why:
                found[index] = why
            seen, why = True, ""
        before = instruction
    return found


def _shared_states(program: StepProgram, facts: Facts) -> set[Value]:
    """Columns that several segments read."""
    calls = [i for i in program.forward if isinstance(i, Call)]
    states = Counter(v for call in calls for v in set(values_of_states(call, facts).values()))
    return {v for v, count in states.items() if count > 1}


def _chains(program: StepProgram, parts: StepParts, backward: dict[int, Call]) -> Iterator[list[Call]]:
    """Runs of neighbouring calls, each of which hands its rows to the next and to nobody else."""
    facts, chain = parts.facts, list[Call]()
    shared = _shared_states(program, facts)
    for instruction in (*program.forward, None):
        if chain and _why_cut(program, facts, chain[-1], instruction, backward, shared):
            if len(chain) > 1 and chain[-1].segment in backward and _reads_along(facts, chain):
                yield chain
            chain = []
        if isinstance(instruction, Call) and not _why_alone(facts, instruction, shared):
            chain.append(instruction)


def _why_alone(facts: Facts, instruction: StepInstruction | None, shared: set[Value]) -> str:
    """Why a part of the step is in no loop with others; "" if it may be."""
    if not isinstance(instruction, Call):
        return "a part runs unchunked"
    way = instruction.way
    if isinstance(instruction, CallLoss) or way.saves or way.several:
        return "the loss is computed"
    if way.full:
        return "some rows may read all rows"
    alone = shared.isdisjoint(values_of_states(instruction, facts).values())
    return "" if alone else "several read one state"


def _why_cut(
    program: StepProgram,
    facts: Facts,
    before: StepInstruction | None,
    after: StepInstruction | None,
    backward: dict[int, Call],
    shared: set[Value],
) -> str:
    """Why a part of the step is not in one loop with the one before it; "" if it is."""
    alone = (before is not None and _why_alone(facts, before, shared)) or _why_alone(facts, after, shared)
    if alone or before is None:
        return alone
    assert isinstance(before, Call) and isinstance(after, Call)
    return "" if _hands_on(program, facts, before, after, backward) else OTHERS_READ


def _reads_along(facts: Facts, chain: list[Call]) -> bool:
    """True if a segment reads along the sequence: its chunks are those of the loop."""
    return any(facts.segments[call.segment].mixings for call in chain)


def _hands_on(
    program: StepProgram,
    facts: Facts,
    before: Call,
    after: Call,
    backward: dict[int, Call],
) -> bool:
    """True if all that a segment makes are rows that the next one reads, and nobody else."""
    first, second = facts.segments[before.segment], facts.segments[after.segment]
    if len(first.outputs) != 1 or first.removed != second.removed:
        return False
    (node,) = first.outputs
    value, gradient = Value(ValueKind.CAPTURED, node), Value(ValueKind.GRADIENT, node)
    own = [before, after, *(backward[c.segment] for c in (before, after) if c.segment in backward)]
    others = [i for i in (*program.forward, *program.backward) if not any(i is o for o in own)]
    if any(v in (value, gradient) for i in others for v in (*i.inputs, *i.results)):
        return False
    axis = row_axis(facts, node)
    if axis is None or not axis[1].simple or node not in second.rows:
        return False
    if before.segment not in backward:  # nothing that is trained comes before it
        return node not in facts.needs_grad
    return after.segment in backward and gradient in backward[after.segment].results


def _replaced(
    body: tuple[StepInstruction, ...], calls: list[Call], loop: ChunksFirst
) -> Iterator[StepInstruction]:
    """The loop in the place of the first call; the others go, and what is done between them comes after."""
    for instruction in body:
        if instruction is calls[0]:
            yield loop
        elif not any(instruction is c for c in calls):
            yield instruction


@dataclass(frozen=True)
class _Loop:
    """Calls of neighbouring segments, in the order of the forward, and by segment those of their backward."""

    facts: Facts
    calls: list[Call]
    backward_of: dict[int, Call]

    def forward(self) -> ChunksFirst:
        """Hands over the rows of the last segment, and the states of all."""
        body = tuple(self._forward(k) for k in range(len(self.calls)))
        return ChunksFirst(body=body, inputs=read_from_outside(body), results=_results(body))

    def backward(self) -> ChunksFirst:
        """Hands over the gradients of what comes in from outside, and of the constants."""
        numbers = range(len(self.calls))
        again = tuple(self._again(k) for k in numbers)
        trained = (k for k in reversed(numbers) if self.calls[k].segment in self.backward_of)
        body = tuple(map(self._backward, trained))
        inputs = read_from_outside((*body, *again))
        return ChunksFirst(body=body, again=again, inputs=inputs, results=_results(body))

    def _forward(self, k: int) -> Call:
        call = self.calls[k]
        results = [v for v in call.results if v.node not in self._between]
        return self._call(call, k, "forward", self._given(call), [*results, *self._states(k)], saves=False)

    def _again(self, k: int) -> Call:
        call = self.calls[k]
        return self._call(call, k, "again", [*self._given(call), *self._states(k)], [], saves=True)

    def _backward(self, k: int) -> Call:
        call = self.backward_of[self.calls[k].segment]
        results = [v for v in call.results if not self._passes(v)]
        given = [*self._given(call), *self._states(k)]
        lent = self._lent() if k == 0 else {}
        made = self._call(call, k, "backward", [*lent.values(), *given], results, saves=True)
        return replace(made, way=replace(made.way, overwrites=frozenset(lent)))

    def _lent(self) -> dict[Buffer, Value]:
        """The gradient of what goes out, if that of what comes in may be written over it: it was read."""
        first, last = (self.facts.segments[self.calls[k].segment] for k in (0, -1))
        out = written_over(self.facts, first, last)
        if out is None:
            return {}
        rows = self.calls[0].programs.diff_rows[0]
        return {Buffer(BufferKind.COTANGENT, rows): Value(ValueKind.GRADIENT, out)}

    def _call(
        self, call: Call, k: int, name: str, inputs: list[Value], results: list[Value], saves: bool
    ) -> Call:
        kept = everywhere(CHUNK) if saves else ()
        way = replace(call.way, together=self._buffers(k), overwrites=frozenset(), saves=kept)
        return replace(call, procedure_name=name, way=way, inputs=tuple(inputs), results=tuple(results))

    def _given(self, call: Call) -> list[Value]:
        return [v for v in call.inputs if not self._passes(v)]

    @property
    def _between(self) -> set[object]:
        return {self.facts.segments[c.segment].outputs[0] for c in self.calls[:-1]}

    def _passes(self, value: Value) -> bool:
        """True for rows between two segments, and their gradients."""
        return value.kind in (ValueKind.CAPTURED, ValueKind.GRADIENT) and value.node in self._between

    def _buffers(self, k: int) -> frozenset[Buffer]:
        """What a segment takes from its neighbours and hands to them, by the names of its programs."""
        call, found = self.calls[k], set[Buffer]()
        segment, model = self.facts.segments[call.segment], call.programs.segment
        if k > 0:
            taken = self.facts.segments[self.calls[k - 1].segment].outputs[0]
            node = model.rows[segment.rows.index(taken)]
            found |= {Buffer(BufferKind.ROWS, node), Buffer(BufferKind.GRADIENT, node)}
        if k < len(self.calls) - 1:
            (node,) = model.outputs
            found |= {Buffer(BufferKind.OUTPUT, node), Buffer(BufferKind.COTANGENT, node)}
        return frozenset(found)

    def _states(self, k: int) -> list[Value]:
        return [*values_of_states(self.calls[k], self.facts).values()]


def _results(body: tuple[Call, ...]) -> tuple[Value, ...]:
    return tuple(v for call in body for v in call.results)
