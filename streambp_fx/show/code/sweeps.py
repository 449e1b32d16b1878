"""The sweeps of a segment: its programs, chunk by chunk, forwards and in reverse."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ...passes.graph.facts import Axis, shape_of, tensors_of
from ...passes.graph.printing import fold
from ...passes.s4_trace.carried_state import state_of_recurrence
from ...passes.step.instructions import (
    BY_COLUMNS,
    BY_ROWS,
    Allocate,
    Buffer,
    BufferKind,
    Chunks,
    Free,
    Instruction,
    Keep,
    Normalize,
    Over,
    Overwrite,
    Round,
    Run,
    Scale,
    WriteRows,
)
from ...passes.step.row_chunks import rows_before
from ...passes.step.saving import Share
from .body import docstring, returned, targets
from .programs import Key, SegmentCode


class Sweeps:
    """The functions that run one distinct segment.

    Args:
        code: its programs.
        numbers: which segments they serve, in words.
    """

    def __init__(self, code: SegmentCode, numbers: str) -> None:
        self.code, self.numbers = code, numbers
        self.context, self.runner, self.segment = code.context, code.runner, code.segment
        self.size = self.context.printer.size

    def functions(self) -> list[str]:
        """The procedures of the segment, one function each; of a loss, sweep and scaling together."""
        if self.code.one_sweep:
            return [self._loss()]
        texts = []
        for full in self.code.reaches():
            texts.append(self._forward(full))
            if self.code.trained:
                texts.append(self._backward(full))
        return texts

    # ---- names

    def name(self, what: str, full: bool = False) -> str:
        """Name of a sweep: "forward", "backward" or "loss"."""
        return f"{self.code.label}_{what}{'_of_all_rows' if full else ''}"

    def parameters(self, cotangents: bool = False) -> list[str]:
        """Names of the parameters of a sweep; `cotangents`: with the gradients, and what was kept."""
        code = self.code
        first = [*code.cotangents, *code.kept] if cotangents else []
        names = [*first, *code.rows, *code.constants]
        names += [name for _, name in code.whole_used()]
        seed = ["seed"] if code.seeded else []
        return [*names, *self.context.symbols.values(), *seed, *code.flags.values()]

    # ---- instructions

    def _head(self, name: str, parameters: list[str], document: str) -> list[str]:
        lines = [*fold(0, f"def {name}(", parameters, "):"), *docstring(document)]
        removed = f" - {self.segment.removed}" if self.segment.removed else ""
        return [*lines, f"    total = T{removed}"]

    def _print(self, body: Iterable[Instruction], full: bool) -> list[str]:
        """The instructions, in order."""
        return [line for i in body for line in PRINT[type(i)](self, i, full)]

    def _free(self, instruction: Free, full: bool) -> list[str]:
        return [f"    del {self.code.names[instruction.buffer]}"]

    def _scale(self, instruction: Scale, full: bool) -> list[str]:
        """The gradient of the printed loss is one; what it was divided by comes back."""
        half = self.code.calls[full]["scaling"].way.half
        return [f"    {self.code.names[instruction.buffer]}.mul_(unit)"] if half else []

    def _allocate(self, instruction: Allocate, full: bool) -> list[str]:
        buffer, name = instruction.buffer, self.code.names[instruction.buffer]
        assert buffer.node is not None
        if buffer.by_chunk:
            return self._states_of_recurrence(buffer)
        dtype = tensors_of(buffer.node)[0].dtype
        own = self.runner.sum_dtype(buffer, dtype)
        if buffer.kind is BufferKind.SUM:
            of = self.code.names[Buffer(BufferKind.CONSTANT, buffer.node)]
            return [f"    {name} = torch.zeros_like({of}{f', dtype={own}' if own != dtype else ''})"]
        like = [*self.code.rows, *self.code.constants][0]
        shape = "[" + ", ".join(self.size(s) for s in shape_of(buffer.node)) + "]"
        function = "zeros" if instruction.zero else "empty"
        lines = fold(4, f"{name} = torch.{function}(", [shape, f"dtype={own}", f"device={like}.device"], ")")
        first = buffer.kind is BufferKind.STATE and name == self.code.states[0]
        return ["    # the state: what later chunks read of this one", *lines] if first else lines

    def _overwrite(self, instruction: Overwrite, full: bool) -> list[str]:
        """Nothing is written over: it has memory of its own, as where somebody else may hold the other."""
        return self._allocate(Allocate(instruction.buffer, instruction.zero), full)

    def _states_of_recurrence(self, buffer: Buffer) -> list[str]:
        """What each chunk begins with, and what the last one leaves."""
        assert buffer.node is not None
        name, (sizes, dtype) = self.code.names[buffer], state_of_recurrence(buffer.node, buffer.wide)
        like = [*self.code.rows, *self.code.constants][0]
        shape = "[" + ", ".join(["len(split_rows(total, CHUNK)) + 1", *map(self.size, sizes)]) + "]"
        lines = fold(4, f"{name} = torch.zeros(", [shape, f"dtype={dtype}", f"device={like}.device"], ")")
        return ["    # the state before each chunk, and after the last one", *lines]

    def _chunks(self, loop: Chunks, full: bool) -> list[str]:
        if loop.over is Over.NOT_COUNTED:  # the printed step leaves no rows out
            return []
        found = f"enumerate(split_rows(total, {loop.size.value.upper()}))"
        chunks = f"reversed(list({found}))" if loop.reverse else found
        lines = [f"    for index, (start, rows) in {chunks}:", *self._outside(loop.share)]
        return lines + [line for i in loop.body for line in PRINT[type(i)](self, i, full)]

    def _run_chunk(self, instruction: Run, full: bool) -> list[str]:
        return [*self._extent(full, instruction.own), *self._run(instruction, full)]

    def _keep(self, instruction: Keep, full: bool) -> list[str]:
        return [f"        {self.code.saved}.append(chunk_saved)"]

    def _outside(self, share: Share) -> list[str]:
        """Chunks of which something else is saved have a loop of their own."""
        begin, end = share
        tests = [f"start * {begin.denominator} < {begin.numerator} * T"] if begin else []
        tests += [f"start * {end.denominator} >= {end.numerator} * T"] if end != 1 else []
        return [f"        if {' or '.join(tests)}:", "            continue"] if tests else []

    def _extent(self, full: bool, own: bool) -> list[str]:
        """The columns of a chunk, as the runtime chooses them."""
        before = 0 if own else rows_before(self.segment, full)
        low, comment = "0" if before is None else "start", ""
        if before:
            low, comment = f"max(0, start - {before})", f"  # a window of {before + 1} rows"
        lines = [f"        low = {low}{comment}", "        prefix = start - low"]
        if self.code.states:
            lines.append(f"        columns = {'total' if full and not own else 'prefix + rows'}")
        return lines

    def _run(self, instruction: Run, full: bool) -> list[str]:
        """Find the program for the chunk and call it."""
        code, key = self.code, Key(instruction.program, full, instruction.price)
        values = {n: n for n in code.inputs(key.kind)}
        values |= {"seed": "seed + (index << 12)", "saved": f"{code.saved}[index]"}
        values |= {code.names[b]: self._given(b) for b in instruction.inputs if b.node is not None}
        saves = [b for b in instruction.results if b.kind is BufferKind.KEPT]
        results = [f"chunk_{code.names[b]}" for b in instruction.results if b not in saves]
        results += ["*chunk_saved"] if saves else []
        lines = fold(8, f"program = {code.chooser(key)}(", code.chooser_parameters(), ")")
        target = f"{targets(results)} = " if results else ""
        arguments = [values[n] for n in code.parameters(key)]
        return [*lines, *fold(8, f"{target}program(", arguments, ")")]

    def _given(self, buffer: Buffer) -> str:
        """What of a tensor goes into a program."""
        name = self.code.names[buffer]
        if buffer.by_chunk:
            return f"{name}.narrow(0, index, 2)"
        if buffer.kind in BY_COLUMNS:
            return f"{name}.narrow({buffer.dim}, low, columns)"
        if buffer.kind not in BY_ROWS:
            return name
        dim, axis, sizes = self._axis(buffer)
        rows = f"rows_of({name}, {dim}, {sizes}, start, rows)"
        return f"{name}.narrow({dim}, start, rows)" if axis.simple else rows

    def _write(self, instruction: WriteRows, full: bool) -> list[str]:
        name, add = self.code.names[instruction.buffer], instruction.add
        dim, axis, sizes = self._axis(instruction.buffer)
        if axis.simple:
            return [f"        {name}.narrow({dim}, start, rows).{'add_' if add else 'copy_'}(chunk_{name})"]
        return [f"        {'add' if add else 'write'}_rows({name}, {dim}, {sizes}, start, chunk_{name})"]

    def _axis(self, buffer: Buffer) -> tuple[int, Axis, str]:
        """The dim of the rows; and, where others are merged with them, the sizes."""
        assert buffer.node is not None
        dim, axis = self.runner.axis(self.runner.twins[buffer.node])
        return dim, axis, f"{self.size(axis.outer)}, total, {self.size(axis.inner)}"

    def _normalize(self, instruction: Normalize, full: bool) -> list[str]:
        name = self.code.names[instruction.buffer]
        return [
            "    # float16: the coefficients of a mean are so small that gradients would vanish",
            f"    unit = power_of_two_above({name})",
            f"    {name} = {name} / unit",
        ]

    def _round(self, instruction: Round, full: bool) -> list[str]:
        """A sum in a wider dtype, in the dtype of what it is the gradient of."""
        buffer = instruction.buffer
        assert buffer.node is not None
        name, dtype = self.code.names[buffer], tensors_of(buffer.node)[0].dtype
        note = "  # written over the sum where it is added to a gradient that the parameter has"
        if self.runner.sum_dtype(buffer, dtype) == dtype:
            return []
        return [f"    {name} = {name}.to({dtype}){note if name == self.code.accumulators[0] else ''}"]

    # ---- procedures

    def _forward(self, full: bool) -> str:
        code = self.code
        lines = self._head(self.name("forward", full), self.parameters(), f"{self.numbers}, forwards.")
        lines += [f"    {code.saved} = []"] if code.saves else []
        lines += self._print(code.procedure("forward", full).body, full)
        return "\n".join([*lines, *returned([*code.outputs, *code.kept])])

    def _backward(self, full: bool) -> str:
        code = self.code
        note = f"{self.numbers}, backwards: gradients of its streamed inputs, then of its parameters."
        lines = self._head(self.name("backward", full), self.parameters(cotangents=True), note)
        for buffer in self.runner.programs.buffers(BufferKind.COTANGENT) if len(code.cotangents) > 1 else ():
            lines.append(f"    if {code.names[buffer]} is None:")
            lines += [f"    {line}" for line in self._allocate(Allocate(buffer, zero=True), False)]
        lines += [f"    {n} = {n}.contiguous()" for n in code.cotangents]
        lines += self._print(code.procedure("backward", full).body, full)
        return "\n".join([*lines, *returned([*code.row_gradients, *code.accumulators])])

    def _loss(self) -> str:
        """Values and gradients in one sweep; what the loss is made of is linear in the values."""
        code = self.code
        note = (
            f"{self.numbers}: the values by rows, and all gradients for a unit gradient of the loss, in one "
            "sweep. The loss is linear in the values, so its derivative at zero is its derivative."
        )
        lines = self._head(self.name("loss"), [*self.parameters(), "loss_of"], note)
        (output,), (rows, *rest) = code.outputs, code.procedure("loss").body
        lines += self._print([rows], False)
        lines += [f"    ({code.cotangents[0]},) = differentiate(loss_of, [{output}], [0])"]
        lines += [f"    {code.cotangents[0]} = {code.cotangents[0]}.contiguous()"]
        lines += self._print([*rest, *code.procedure("scaling").body], False)
        return "\n".join([*lines, *returned([output, *code.row_gradients, *code.accumulators])])


#: What prints each instruction; one device runs a printed step.
PRINT: Mapping[type, Callable[[Sweeps, Any, bool], list[str]]] = {
    Allocate: Sweeps._allocate,
    Overwrite: Sweeps._overwrite,
    Chunks: Sweeps._chunks,
    Free: Sweeps._free,
    Normalize: Sweeps._normalize,
    Scale: Sweeps._scale,
    Round: Sweeps._round,
    Run: Sweeps._run_chunk,
    WriteRows: Sweeps._write,
    Keep: Sweeps._keep,
}
