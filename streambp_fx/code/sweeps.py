"""The sweeps of a segment: its programs, chunk by chunk, forwards and in reverse."""

from __future__ import annotations

import torch
from torch.fx import Node

from ..passes.ir import shape_of, sum_dtype, tensors_of
from ..passes.printing import fold
from .body import docstring, returned, targets
from .programs import SegmentCode


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
        code = self.code
        first = [*code.cotangents, *([code.kept] if code.saved else [])] if cotangents else []
        names = [*first, *code.rows, *code.constants]
        names += [name for _, name in code.whole_used()]
        seed = ["seed"] if code.seeded else []
        return [*names, *self.context.symbols.values(), *seed, *code.flags.values()]

    # ---- parts

    def _head(self, name: str, parameters: list[str], document: str) -> list[str]:
        lines = [*fold(0, f"def {name}(", parameters, "):"), *docstring(document)]
        removed = f" - {self.segment.removed}" if self.segment.removed else ""
        return [*lines, f"    total = T{removed}"]

    def _make(self, name: str, node: Node, function: str, wide: bool = False) -> list[str]:
        like = [*self.code.rows, *self.code.constants][0]
        shape = "[" + ", ".join(self.size(s) for s in shape_of(node)) + "]"
        dtype = tensors_of(node)[0].dtype
        arguments = [shape, f"dtype={self._sum_dtype(dtype) if wide else dtype}", f"device={like}.device"]
        return fold(4, f"{name} = torch.{function}(", arguments, ")")

    def _states(self, gradients: bool = False) -> list[str]:
        names = self.code.state_gradients if gradients else self.code.states
        lines = [] if gradients or not names else ["    # the state: what later chunks read of this one"]
        for name, state in zip(names, self.code.programs.states.values(), strict=True):
            lines += self._make(name, state.node, "zeros" if gradients else "empty", gradients)
        return lines

    def _sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Of a sum over chunks."""
        return sum_dtype(dtype) if self.code.programs.wide else dtype

    def _loop(self, reverse: bool = False) -> str:
        chunk = "CHUNK" if self.segment.mixings else "LOSS_CHUNK"
        found = f"enumerate(chunks(total, {chunk}))"
        return f"    for index, (start, rows) in {f'reversed(list({found}))' if reverse else found}:"

    def _extent(self, full: bool, own: bool) -> list[str]:
        """The columns of a chunk, as the runtime chooses them."""
        low, comment = ("0", "") if self.segment.mixings and not own else ("start", "")
        if not own and self.segment.window is not None and not full:
            window = int(self.segment.window)
            low, comment = f"max(0, start - {window - 1})", f"  # a window of {window} rows"
        lines = [f"        low = {low}{comment}", "        prefix = start - low"]
        if self.code.states:
            lines.append(f"        columns = {'total' if full and not own else 'prefix + rows'}")
        return lines

    def _rows(self, name: str, node: Node) -> str:
        dim, axis = self.runner.axis(node)
        if axis.simple:
            return f"{name}.narrow({dim}, start, rows)"
        return f"rows_of({name}, {dim}, {self.size(axis.outer)}, total, {self.size(axis.inner)}, start, rows)"

    def _write(self, name: str, node: Node, value: str, add: bool = False) -> str:
        dim, axis = self.runner.axis(node)
        if axis.simple:
            return f"        {name}.narrow({dim}, start, rows).{'add_' if add else 'copy_'}({value})"
        sizes = f"{self.size(axis.outer)}, total, {self.size(axis.inner)}"
        return f"        {'add' if add else 'write'}_rows({name}, {dim}, {sizes}, start, {value})"

    def _call(self, kind: str, full: bool, results: list[str]) -> list[str]:
        """Find the program for the chunk and call it."""
        code = self.code
        values = {n: n for n in code.inputs(kind, full)}
        values |= {n: f"{code.kept}[index][{k}]" for k, n in enumerate(code.saved)}
        values["seed"] = "seed + (index << 12)"
        pairs = [
            *zip(code.rows, self.segment.rows, strict=True),
            *zip(code.cotangents, self.runner.diff_outputs, strict=True),
        ]
        values |= {name: self._rows(name, node) for name, node in pairs}
        for names in (code.states, code.state_gradients):
            for name, state in zip(names, code.programs.states.values(), strict=True):
                values[name] = f"{name}.narrow({state.dim}, low, columns)"
        lines = fold(8, f"program = {code.chooser(kind, full)}(", code.chooser_parameters(), ")")
        target = f"{targets(results)} = " if results else ""
        arguments = [values[n] for n in code.parameters(kind, full)]
        return [*lines, *fold(8, f"{target}program(", arguments, ")")]

    def _fill_states(self, full: bool) -> list[str]:
        own = not self.segment.chained
        return [self._loop(), *self._extent(full, own), *self._call("states", full, [])]

    # ---- sweeps

    def _forward(self, full: bool) -> str:
        code = self.code
        lines = self._head(self.name("forward", full), self.parameters(), f"{self.numbers}, forwards.")
        lines += self._states()
        for name, node in zip(code.outputs, self.segment.outputs, strict=True):
            lines += self._make(name, node, "empty")
        if full and code.states:
            lines += self._fill_states(full)
        saved = [] if full else code.saved
        results = [f"chunk_{n}" for n in code.outputs]
        lines += [f"    {code.kept} = []"] if code.saved else []
        lines += [self._loop(), *self._extent(full, False), *self._call("forward", full, [*results, *saved])]
        pairs = zip(code.outputs, self.segment.outputs, results, strict=True)
        lines += [self._write(*pair) for pair in pairs]
        lines += [f"        {code.kept}.append(({', '.join(saved)}))"] if saved else []
        return "\n".join([*lines, *returned([*code.outputs, *([code.kept] if code.saved else [])])])

    def _backward(self, full: bool) -> str:
        code = self.code
        note = f"{self.numbers}, backwards: gradients of its streamed inputs, then of its parameters."
        lines = self._head(self.name("backward", full), self.parameters(cotangents=True), note)
        if len(code.cotangents) > 1:
            for name, node in zip(code.cotangents, self.runner.diff_outputs, strict=True):
                lines.append(f"    if {name} is None:")
                lines += [f"    {line}" for line in self._make(name, node, "zeros")]
        lines += self._accumulators()
        lines += self._states()
        if code.states:
            lines += self._fill_states(full)
            lines += self._states(gradients=True)
        lines += self._gradient_buffers()
        results = [f"chunk_{n}" for n in code.row_gradients]
        lines += [self._loop(reverse=True), *self._extent(full, False), *self._call("joint", full, results)]
        written = list(zip(code.row_gradients, self.runner.diff_rows, results, strict=True))
        lines += [self._write(*target) for target in written]
        if full and code.states:
            lines += [self._loop(), *self._extent(full, True), *self._call("state_joint", full, results)]
            lines += [self._write(*target, add=True) for target in written]
        lines += self._rounded()
        return "\n".join([*lines, *returned([*code.row_gradients, *code.accumulators])])

    def _accumulators(self) -> list[str]:
        code = self.code
        of = dict(zip(self.segment.constants, code.constants, strict=True))
        lines = []
        for name, node in zip(code.accumulators, self.runner.diff_constants, strict=True):
            own = tensors_of(node)[0].dtype
            dtype = f", dtype={wide}" if (wide := self._sum_dtype(own)) != own else ""
            lines.append(f"    {name} = torch.zeros_like({of[node]}{dtype})")
        return lines

    def _rounded(self) -> list[str]:
        """Sums in a wider dtype, in the dtype of what they are gradients of."""
        pairs = zip(self.code.accumulators, self.runner.diff_constants, strict=True)
        dtypes = [(name, tensors_of(node)[0].dtype) for name, node in pairs]
        lines = [f"    {n} = {n}.to({dtype})" for n, dtype in dtypes if self._sum_dtype(dtype) != dtype]
        note = "    # written over the sum where the parameter has a gradient that it is added to"
        return [note, *lines] if lines else []

    def _gradient_buffers(self) -> list[str]:
        pairs = zip(self.code.row_gradients, self.runner.diff_rows, strict=True)
        return [line for name, node in pairs for line in self._make(name, node, "empty")]

    def _loss(self) -> str:
        """Values and gradients in one sweep; what the loss is made of is linear in the values."""
        code = self.code
        note = (
            f"{self.numbers}: the values by rows, and all gradients for a unit gradient of the loss, in one "
            "sweep. The loss is linear in the values, so its derivative at zero is its derivative."
        )
        parameters = [*self.parameters(), "loss_of"]
        lines = self._head(self.name("loss"), parameters, note)
        (output,), (node,) = code.outputs, self.segment.outputs
        lines += self._make(output, node, "zeros")
        lines += [f"    ({code.cotangents[0]},) = differentiate(loss_of, [{output}], [0])"]
        half = any(
            t.dtype == torch.float16 for n in (*self.segment.rows, *self.segment.nodes) for t in tensors_of(n)
        )
        if half:
            lines += [
                "    # float16: the coefficients of a mean are so small that gradients would vanish",
                f"    unit = power_of_two_above({code.cotangents[0]})",
                f"    {code.cotangents[0]} = {code.cotangents[0]} / unit",
            ]
        lines += [*self._accumulators(), *self._gradient_buffers()]
        results = [f"chunk_{n}" for n in (output, *code.row_gradients)]
        lines += [self._loop(), *self._extent(False, False), *self._call("loss", False, results)]
        names, nodes = [output, *code.row_gradients], [node, *self.runner.diff_rows]
        lines += [self._write(*target) for target in zip(names, nodes, results, strict=True)]
        gradients = [*code.row_gradients, *code.accumulators]
        if half:
            lines += [f"    {n}.mul_(unit)" for n in gradients]
        lines += self._rounded()
        return "\n".join([*lines, *returned([output, *gradients])])
