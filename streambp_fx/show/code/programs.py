"""The programs of one distinct segment: one function for each kind of program and of chunk."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import NamedTuple

from torch.fx import Node

from ...passes.graph.facts import Mask
from ...passes.graph.printing import WIDTH, Printer, fold
from ...passes.s4_trace.program_inputs import SIZES, Extent
from ...passes.s4_trace.vjp import Guards
from ...passes.s6_schedule.program import Call
from ...passes.step.instructions import Buffer, BufferKind, Run
from ...passes.step.procedure import Procedure
from ...passes.step.saving import Price
from ...runtime.segments.owned_buffers import OwnedBuffers
from ...runtime.segments.segment_runner import SegmentRunner
from ...runtime.segments.step_blocks import StepData
from .body import Body, BodyPrinter, docstring, function
from .context import Context
from .names import Scope

PURPOSE = {
    "forward": "Outputs of a chunk; its state rows are written.",
    "states": "The state rows of a chunk alone: the rebuild before a backward.",
    "columns": "The state rows of a chunk, without the states of recurrences, which were kept.",
    "joint": "Recomputes and differentiates a chunk; gradients of parameters and states are added in place.",
    "loss": "Values of a chunk and their gradients, in one sweep.",
    "state_joint": "Differentiates the state rows of a chunk, once their gradient is complete.",
}


#: Calls of a segment by name of the procedure: of the step as it is, or where each row may read all rows.
Calls = dict[bool, dict[str, Call]]


@dataclass
class Variant:
    """One printed program and the chunks that it is for."""

    kind: str
    condition: list[str]
    body: Body
    name: str = ""


class Key(NamedTuple):
    """What the programs that are chosen from have in common.

    Attributes:
        kind: of program.
        full: each row may read all rows.
        price: at which values are saved, or were.
    """

    kind: str
    full: bool
    price: Price | None


class SegmentCode:
    """Names and programs of one distinct segment.

    Args:
        context: what is printed.
        runner: the runner of the first segment of its kind.
        label: prefix of the names of its functions.
        calls: what of it the step calls.

    Attributes:
        one_sweep: it is a loss head whose gradient comes with its values.
        trained: a gradient reaches its outputs.
        kept: what its forward hands to its backward besides the inputs.
    """

    def __init__(self, context: Context, runner: SegmentRunner, label: str, calls: Calls) -> None:
        self.context, self.runner, self.label, self.calls = context, runner, label, calls
        self.segment, self.programs = runner.segment, runner.programs
        first, *others = next(iter(calls.values())).values()
        self.one_sweep, self.trained = first.procedure_name == "loss", bool(others)
        scope = Scope(context.globals.taken)
        name = lambda nodes, form="{}": [scope.new(form.format(context.model.of(n))) for n in nodes]  # noqa: E731
        states = [s.node for s in self.programs.states.values()]
        self.rows, self.constants = name(self.segment.rows), name(self.segment.constants)
        self.whole = name(self.segment.whole)
        self.states, self.state_gradients = name(states, "{}_state"), name(states, "grad_{}_state")
        self.outputs = name(self.segment.outputs)
        self.cotangents = name(runner.diff_outputs, "grad_{}")
        self.row_gradients = name(runner.diff_rows, "grad_{}")
        self.accumulators = name(runner.diff_constants, "grad_{}")
        self.saves = first.way.saves
        self.saved = scope.new("saved") if self.saves else ""
        by_chunk = zip(self.states, self.programs.states.values(), strict=True)
        kept_states = [n for n, s in by_chunk if s.by_chunk and first.way.keeps_states]
        self.kept = [*([self.saved] if self.saves else []), *kept_states]
        self.names = self._names()
        self.flags = {m: t.name for m in self.masks() if (t := context.plain[m]).answer is None}
        self.variants: dict[Key, list[Variant]] = {}
        for full in self.calls:
            self._make(full)

    def _names(self) -> dict[Buffer, str]:
        """What each buffer is called."""
        named = {
            BufferKind.ROWS: self.rows,
            BufferKind.CONSTANT: self.constants,
            BufferKind.WHOLE: self.whole,
            BufferKind.STATE: self.states,
            BufferKind.STATE_GRADIENT: self.state_gradients,
            BufferKind.COTANGENT: self.cotangents,
            BufferKind.SUM: self.accumulators,
        }
        pairs = [p for kind, own in named.items() for p in zip(self.programs.buffers(kind), own, strict=True)]
        outputs = (Buffer(BufferKind.OUTPUT, n) for n in self.programs.segment.outputs)
        gradients = (Buffer(BufferKind.GRADIENT, n) for n in self.programs.diff_rows)
        return dict(
            [
                *pairs,
                *zip(outputs, self.outputs, strict=True),
                *zip(gradients, self.row_gradients, strict=True),
            ]
        )

    # ---- which programs there are

    def masks(self) -> list[Mask]:
        """Masks of the segment that may be plain causal, each once."""
        return [m for m in dict.fromkeys(self.runner.masks) if m in self.context.plain]

    def reaches(self) -> list[bool]:
        """Whether rows may read all rows: False, True, or both where the data decides it."""
        return list(self.calls)

    def procedure(self, name: str, full: bool = False) -> Procedure:
        """A part of the segment's step."""
        return self.calls[full][name].procedure

    def _runs(self, full: bool) -> list[Run]:
        """The calls of programs, in the order in which the programs are printed."""
        runs = [r for call in self.calls[full].values() for _, r in call.procedure.runs()]
        found = {(r.program, r.price): r for r in runs}.values()
        return [run for kind in PURPOSE for run in found if run.program == kind]

    def _make(self, full: bool) -> None:
        choices: list[frozenset[Mask]] = [frozenset()]
        for mask in self.masks():
            answer = self.context.plain[mask].answer
            if answer:
                choices = [c | {mask} for c in choices]
            elif answer is None and not full:
                choices = [d for c in choices for d in (c | {mask}, c)]
        for run in self._runs(full):
            key = Key(run.program, full, run.price)
            found = self.variants.setdefault(key, [])
            for plain in choices:
                step = self.step(plain, full)
                for extent in self.runner.extents(step):
                    self._add(found, key, extent.own() if run.own else extent, step)
            self._name(key, found)

    def step(self, plain: frozenset[Mask], full: bool) -> StepData:
        """A step of the sizes of the sample, with these masks plain; `full`: each row may read all rows."""
        every = frozenset(self.masks() if full else ())
        chunks = self.context.rows, self.context.loss_rows
        sizes, tokens = self.context.values, self.context.tokens
        return StepData(sizes, tokens, 2**40, OwnedBuffers(), *chunks, plain=plain, full=every)

    def _add(self, found: list[Variant], key: Key, extent: Extent, step: StepData) -> None:
        """Print the program of a chunk, unless it is there."""
        numbers = self.runner.numbers(extent, step.seed, step)
        lowered = self.runner.program(key.kind, extent, step, numbers, key.price)
        traces = (t for ts in self.programs.traces.values() for t in ts)
        guards = next(t.guards for t in traces if any(p is lowered for p in t.lowered.values()))
        assert isinstance(guards, Guards)
        named = {str(s): n for s, n in self.context.symbols.items()}
        printer = Printer({s: named.get(n, n) for s, n in guards.names.items()}, self.context.device)
        condition = self._condition(extent, step, printer, guards)
        if any(v.condition == condition for v in found):
            return
        graph = lowered.module.graph
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        given = [n for n in placeholders if not n.meta.get("saved")]
        inputs = dict(zip(given, self.inputs(key.kind), strict=True))
        scope = Scope([*self.context.globals.taken, *inputs.values(), "saved"])
        saved = {n: scope.new(self._name_of_saved(n)) for n in placeholders if n.meta.get("saved")}
        body = BodyPrinter(graph, printer, self.context.model, scope, inputs | saved).print()
        if saved:
            body.lines[:0] = fold(4, "[", list(saved.values()), "] = saved")
        found.append(Variant(key.kind, condition, body))

    def _name_of_saved(self, node: Node) -> str:
        """After the value of the model that it is, or is a part of."""
        origin = self.context.model.by_name.get(node.meta.get("origin"))
        return f"saved_{'value' if origin is None else self.context.model.of(origin)}"

    def _condition(self, extent: Extent, step: StepData, printer: Printer, guards: Guards) -> list[str]:
        """When a program is the right one: lengths of 0 and 1, assumptions of its trace, plain masks."""
        tests = []
        for name, special in zip(("rows", "prefix", "total"), extent.pattern, strict=False):
            if special is not None:
                tests.append(f"{name} == {special}")
            elif not (name == "total" and extent.rows > 1):
                tests.append(f"{name} > 1")
        for symbol in self.programs.symbols:
            value, name = step.sizes[symbol], self.context.symbols[symbol]
            tests.append(f"{name} == {value}" if value in (0, 1) else f"{name} > 1")
        tests += [printer.size(g) for g in guards.conditions()]
        return tests + [n if m in step.plain else f"not {n}" for m, n in self.flags.items()]

    def _name(self, key: Key, variants: list[Variant]) -> None:
        """Names of the functions; programs that read alike are one function."""
        base = f"{self.label}_{key.kind}_chunk{self._suffix(key)}"
        known: dict[tuple, str] = {}
        for variant in variants:
            text = (tuple(variant.body.lines), tuple(variant.body.results), variant.body.refused)
            if text not in known:
                words = [w for w, c in WORDS.items() if c in variant.condition]
                words += ["plain" for n in self.flags.values() if n in variant.condition][:1]
                known[text] = self.context.globals.new("_".join([base, *words]))
            variant.name = known[text]

    # ---- text

    def used(self, name: str) -> bool:
        """True if some program reads an input."""
        return any(name in self.parameters(key) for key in self.variants)

    @property
    def seeded(self) -> bool:
        """True if some program draws random numbers."""
        return self.used("seed")

    def whole_used(self) -> list[tuple[Node, str]]:
        """Whole values that some program reads, with the names they have here."""
        pairs = zip(self.segment.whole, self.whole, strict=True)
        return [(node, name) for node, name in pairs if self.used(name)]

    def inputs(self, kind: str) -> list[str]:
        """Names of a program's inputs, in order, but for what the forward has saved."""
        slots = self.programs.slots(kind)
        symbols = (self.context.symbols[s] for s in slots.symbols)
        return [*SIZES, "seed", *symbols, *(self.names[buffer] for buffer in slots.tensors)]

    def parameters(self, key: Key) -> list[str]:
        """Inputs that some program of a kind reads; at the end what the forward has saved, in a list."""
        bodies = [v.body for v in self.variants[key]]
        read = [n for n in self.inputs(key.kind) if any(b.reads(n) or b.refused for b in bodies)]
        takes = key.price is not None and self.programs.reads_kept(key.kind)
        return [*read, "saved"] if takes else read

    def chooser(self, key: Key) -> str:
        """Name of the function that finds the program of a kind."""
        return f"{self.label}_{key.kind}{self._suffix(key)}_program"

    def _suffix(self, key: Key) -> str:
        """What tells programs of a kind apart that read other rows, or where other values are saved."""
        prices = list(dict.fromkeys(k.price for k in self.variants if k.kind == key.kind))
        saved = f"_saving_{prices.index(key.price)}" if len(self.saves) > 1 else ""
        return f"{'_of_all_rows' if key.full else ''}{saved}"

    def chooser_parameters(self) -> list[str]:
        """Names of what that function is given: sizes of the chunk, and answers about the masks."""
        others = [self.context.symbols[s] for s in self.programs.symbols]
        return ["rows", "prefix", "total", *others, *self.flags.values()]

    def functions(self) -> list[str]:
        """All programs, and for each kind the function that finds the right one."""
        texts = []
        for key, variants in self.variants.items():
            parameters, printed = self.parameters(key), set()
            for variant in variants:
                if variant.name not in printed:
                    printed.add(variant.name)
                    note = f"{PURPOSE[key.kind]} For {' and '.join(variant.condition)}."
                    texts.append(function(variant.name, parameters, note, variant.body))
            texts.append(self._choose(key, variants))
        return texts

    def _choose(self, key: Key, variants: list[Variant]) -> str:
        lines = fold(0, f"def {self.chooser(key)}(", self.chooser_parameters(), "):")
        lines += docstring("The program for a chunk of these sizes.")
        for variant in variants:
            tests = textwrap.wrap(" and ".join(variant.condition), WIDTH - 12)
            lines += (
                [f"    if {tests[0]}:"]
                if len(tests) == 1
                else ["    if (", *(f"        {t}" for t in tests), "    ):"]
            )
            lines.append(f"        return {variant.name}")
        lines.append("    raise no_program(rows, prefix, total)")
        return "\n".join(lines)


WORDS = {"first": "prefix == 0", "of_one_row": "rows == 1"}
