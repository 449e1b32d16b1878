"""The driver of a printed program: the training step, written out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from ...passes.graph.facts import Kind, tensors_of
from ...passes.graph.printing import WIDTH, fold, listed, pack, remark
from ...passes.s6_schedule.build import the_loss
from ...passes.s6_schedule.program import (
    Add,
    Again,
    Call,
    CallLoss,
    Defer,
    Differentiate,
    Drop,
    Fetch,
    GiveBackParameters,
    Group,
    HandOver,
    Layers,
    Leave,
    Linearize,
    ReduceGradients,
    Return,
    RunPart,
    Seed,
    StepInstruction,
    StepProgram,
    TakeParameters,
    Zeros,
)
from ...passes.s6_schedule.program.values import Value, ValueKind
from ...runtime.segments.segment_runner import SegmentRunner
from .body import docstring, targets
from .context import Context
from .names import Scope
from .printed_subgraphs import PrintedSubgraph
from .programs import SegmentCode
from .step_functions import StepFunctions
from .sweeps import Sweeps


class StepCode:
    """Prints the step of a compiled graph.

    Args:
        context: what is printed.
    """

    def __init__(self, context: Context) -> None:
        self.context, self.executor, self.facts = context, context.executor, context.facts
        self.scope = Scope(context.globals.taken)
        self.names: dict[Node, str] = {}
        self.given: list[str] = []
        self.constants: list[str] = []
        self.lines: list[str] = []
        self.tables: list[str] = []
        self.keys: dict[Node, str] = {}
        self.kept: dict[Value, str] = {}  # what forwards hand to backwards, besides their inputs
        self._name_inputs()
        self.scope.taken.update(self.keys.values())
        results = [n for k, n in enumerate(self.executor.results) if k not in self.executor.parts.lazy]
        tensors = [n for n in results if isinstance(n, Node) and n in self.facts.needs_grad and tensors_of(n)]
        self.differentiated = list(dict.fromkeys(tensors))
        self.loss = the_loss(self.differentiated)
        self.program = self._program(context.always_full)
        self.functions = StepFunctions(context, self.program, self._program(context.may_be_full))

    def _program(self, is_full: Callable[[SegmentRunner], bool]) -> StepProgram:
        """The step as it runs on one device, without a gradient of what the loss is not made of."""
        kept_states = self.executor.segments_keeping_states(self.context.rows, self.context.values)
        return self.executor.step_program(
            self.executor.segments_where(is_full),
            kept_states=kept_states,
            seeds=tuple(self.differentiated if self.loss is None else [self.loss]),
        )

    # ---- names

    def _name_inputs(self) -> None:
        for node in self.executor.placeholders:
            kind, name = self.context.model.kind(node), self.context.model.paths[node]
            if kind == "input":
                if self.facts.kinds[node] is Kind.SIZE:
                    continue
                name = self.scope.new(self.context.model.of(node))
                self.given.append(name)
                self.names[node] = self.keys[node] = name
            else:
                self.names[node] = f'{kind}s["{name}"]'
                self.keys[node] = name
        for node, value in self.executor.constants.items():
            self.names[node] = self._constant(node, value)

    def _constant(self, node: Node, value: Any) -> str:
        """A tensor that is part of the graph: written out if it is small."""
        plain = type(value) is torch.Tensor and value.device.type != "meta" and value.numel() <= 64
        if not plain:
            return f'constants["{node.target}"]'
        name = self.context.globals.new(f"CONSTANT_{len(self.constants)}")
        numbers = re.sub(r"\b(inf|nan)\b", r'float("\1")', str(value.tolist()))
        arguments = [numbers, f"dtype={value.dtype}", "device=DEVICE"]
        self.constants += fold(0, f"{name} = torch.tensor(", arguments, ")")
        return name

    def _value(self, node: Node) -> str:
        """A value in the step; named when it is first asked for."""
        if node not in self.names:
            self.names[node] = self.keys[node] = self.scope.new(self.context.model.of(node))
        return self.names[node]

    # ---- the step

    def text(self) -> str:
        """The function `step`."""
        self._sizes()
        self._print(self.program.prologue)
        self._ask_tests()
        self._print(self.program.forward)
        self._print(self.program.backward)
        self._finish()
        body = [line if not line or line.startswith("    ") else f"    {line}" for line in self.lines]
        head = fold(0, "def step(", self.parameters(), "):")
        return "\n".join(["@torch.no_grad()", *head, *docstring(self._document()), *body])

    def _print(self, body: Iterable[StepInstruction]) -> None:
        for instruction in body:
            PRINT[type(instruction)](self, instruction)

    def _elsewhere(self, instruction: StepInstruction) -> None:
        """It has no lines of its own."""

    def parameters(self) -> list[str]:
        """What the step takes."""
        code = "\n".join(self.lines)
        seeded = any(s.code.seeded for s in self.functions.sweeps.values())
        optional = ["buffers=None", *(["constants=None"] if 'constants["' in code else [])]
        cotangents = [] if self.loss is not None else ["cotangents"]
        return [*self.given, "parameters", *cotangents, *optional, *(["seed=0"] if seeded else [])]

    def _document(self) -> str:
        result = "loss" if self.loss is not None else "outputs"
        text = f"One training step: the {result}, and gradients by the name of what they are gradients of."
        more = " `cotangents`: gradients of the outputs that have one, in order."
        return text + ("" if self.loss is not None else more)

    def _sizes(self) -> None:
        seen: set[str] = set()
        for position, dim, symbol, more in self.executor.sizes_at:
            if dim is None or symbol is None or self.context.symbols[symbol] in seen:
                continue
            node, name = self.executor.placeholders[position], self.context.symbols[symbol]
            seen.add(name)
            rest = f" - {more}" if more > 0 else f" + {-more}" if more else ""
            self.lines.append(f"{name} = {self.names[node]}.shape[{dim}]{rest}")
        for guard in self.facts.guards:
            if guard.free_symbols and guard.free_symbols <= set(self.context.symbols):
                condition = self.context.printer.size(guard)
                self.lines += [
                    f"if not ({condition}):",
                    f'        raise ValueError("printed for sizes with {condition}")',
                ]

    def _call_part(self, part: PrintedSubgraph) -> None:
        if part.part.outputs:
            results = [self._value(n) for n in part.part.outputs]
            arguments, head = self._part_arguments(part), f"{targets(results)} = {part.name}("
            if len(head) <= WIDTH - 4:
                self.lines += fold(4, head, arguments, ")")
            else:
                call = fold(4, f") = {part.name}(", arguments, ")")
                self.lines += ["(", *pack(results, 8), *call]

    def _part_arguments(self, part: PrintedSubgraph) -> list[str]:
        return [*(self._value(n) for n in part.values), *part.sizes]

    def _ask_tests(self) -> None:
        for test in self.functions.tests:
            arguments = [self._value(a) if isinstance(a, Node) else a for a in test.arguments]
            self.lines += fold(4, f"{test.name} = bool(test_{test.name}(", arguments, ")[0])")
            if test.fixed:
                self.lines.append(f"if {'not ' if test.answer else ''}{test.name}:")
                self.lines.append('        raise ValueError("printed for another kind of mask")')

    # ---- forward

    def _run_part(self, instruction: RunPart) -> None:
        if instruction.name == "whole values":
            self._call_part(self.functions.whole)
        elif instruction.name == "predicates":
            self.lines.append("# whether rows were selected: where none were, gradients are None, not zeros")
        elif instruction.segment is None:
            self.lines.append("")
            self._call_part(self.functions.epilogue)
        else:
            self.lines.append("")
            if instruction.part.random:
                self.lines.append(f"random_state_{instruction.segment} = torch.get_rng_state()")
            self._call_part(self.functions.parts[str(instruction.segment)])

    def _constants(self, segment: Any) -> str:
        """The constants of a segment as items of a call: from a table where all are parameters."""
        if segment.constants and all(n in self.facts.parameters for n in segment.constants):
            table = f"SEGMENT_{segment.index}"
            if not any(t.startswith(f"{table} =") for t in self.tables):
                names = [f'"{self.keys[n]}"' for n in segment.constants]
                tail = ",)" if len(names) == 1 else ")"
                self.tables.append("\n".join(fold(0, f"{table} = (", names, tail)))
            return f"*[parameters[n] for n in {table}]"
        return ", ".join(self._value(n) for n in segment.constants)

    def _arguments(self, segment: Any, code: SegmentCode) -> list[str]:
        items = [*(self._value(n) for n in segment.rows)]
        items += [c for c in [self._constants(segment)] if c]
        items += [self._value(n) for n in self.functions.whole_of(segment)]
        seed = [f"seed + ({segment.index} << 32)"] if code.seeded else []
        return [*items, *self.context.symbols.values(), *seed, *code.flags.values()]

    def _function(self, sweeps: Sweeps, what: str) -> str:
        """The sweep to call: where the data decides how far rows read, chosen by what it said."""
        reaches = sweeps.code.reaches()
        if len(reaches) == 1:
            return sweeps.name(what, reaches[0])
        tests = [t.name for m in sweeps.code.masks() if (t := self.context.open[m]).answer is None]
        return f"({sweeps.name(what)} if {' and '.join(tests)} else {sweeps.name(what, True)})"

    def _call(self, instruction: Call) -> None:
        segment = self.facts.segments[instruction.segment]
        if instruction.procedure_name == "scaling":  # which the loss has done
            self._accumulate(instruction.results, segment)
        elif instruction.procedure_name == "backward":
            self._backward(segment, instruction)
        else:
            self._forward(segment, instruction)

    def _forward(self, segment: Any, instruction: Call) -> None:
        self.lines.append("")
        sweeps = self.functions.sweeps_of(segment)
        self._refuse_all_rows(segment, sweeps)
        values = (v for v in instruction.results if v.kind in (ValueKind.KEPT, ValueKind.STATE))
        names = [f"{name}_{segment.index}" for name in sweeps.code.kept]
        self.kept.update(zip(values, names, strict=True))
        results = [*(self._value(n) for n in segment.outputs), *names]
        head = f"{targets(results)} = {self._function(sweeps, 'forward')}("
        self.lines += fold(4, head, self._arguments(segment, sweeps.code), ")")

    def _refuse_all_rows(self, segment: Any, sweeps: Sweeps) -> None:
        tests = [t.name for m in sweeps.code.masks() if (t := self.context.open[m]).answer is None]
        if tests and len(sweeps.code.reaches()) == 1:
            self.lines.append(f"if not ({' and '.join(tests)}):")
            words = (
                f"a row attends to nothing: segment {segment.index} runs unchunked then, which is not printed"
            )
            self.lines.append(f'        raise NotImplementedError("{words}")')

    def _call_loss(self, instruction: CallLoss) -> None:
        """The head with its epilogue: loss and gradients come together."""
        segment, position = self.facts.segments[instruction.segment], instruction.position
        sweeps, part = self.functions.sweeps_of(segment), self.functions.epilogue
        rows = self._value(segment.outputs[0])
        self.lines.append("")
        inner = ["rows" if n is segment.outputs[0] else self._value(n) for n in part.values] + part.sizes
        self.lines += fold(4, "loss_of = lambda rows: epilogue(", inner, f")[{position} : {position + 1}]")
        arguments = [*self._arguments(segment, sweeps.code), "loss_of"]
        self.lines += fold(4, f"{rows}, *found = {sweeps.name('loss')}(", arguments, ")")
        self._call_part(part)

    def _group(self, instruction: Group) -> None:
        self._print(instruction.body)

    def _layers(self, instruction: Layers) -> None:
        for body in instruction.rounds:
            self._print(body)

    def _again(self, instruction: Again) -> None:
        self.lines += ["", "    # what was not kept is made again"]
        self._print(instruction.body)

    def _drop(self, instruction: Drop) -> None:
        """Values that nobody reads any more."""
        found = []
        for value in instruction.inputs:
            node = value.node
            if value in self.kept:
                found.append(self.kept[value])
            elif value.kind is ValueKind.CAPTURED and self.names.get(node, "").isidentifier():
                found.append(self.names[node])
        if found:
            self.lines += fold(4, "del ", found, "")

    # ---- backward

    def _seed(self, instruction: Seed) -> None:
        """Gradients of results; those of the epilogue's are taken where it is differentiated."""
        self.lines += ["", "    gradients = {}"]
        inside = set(self.executor.parts.epilogue.outputs)
        for value in instruction.results:
            if value.node not in inside:
                name = self._value(value.node)
                self.lines.append(f"accumulate(gradients, [{name!r}], [{self._cotangent(value)}])")

    def _cotangent(self, value: Value) -> str:
        if self.loss is not None:
            return f"torch.ones_like({self._value(value.node)})"
        return f"cotangents[{self.differentiated.index(value.node)}]"

    def _differentiate(self, instruction: Differentiate) -> None:
        """Differentiate what runs unchunked, by autograd."""
        given = {v.node: v for v in instruction.inputs if v.kind is ValueKind.GRADIENT}
        part, random = self.functions.epilogue, []
        if instruction.segment is not None:
            part = self.functions.parts[str(instruction.segment)]
            random = [f"random_state_{instruction.segment}"] if instruction.part.random else []
            self.lines.append("")
        take = self._popped if instruction.segment is not None else self._cotangent
        cotangents = [take(given[n]) if n in given else "None" for n in instruction.part.outputs]
        wanted = [part.values.index(v.node) for v in instruction.results]
        items = [part.name, *listed(self._part_arguments(part)), str(wanted), *listed(cotangents), *random]
        self.lines += fold(4, "found = differentiate(", items, ")")
        self._accumulate(instruction.results, None)

    def _popped(self, value: Value) -> str:
        return f'gradients.pop("{self.keys[value.node]}", None)'

    def _accumulate(self, values: Sequence[Value], segment: Any) -> None:
        nodes = [v.node for v in values]
        names = [f'"{self.keys[n]}"' for n in nodes]
        constants = [] if segment is None else segment.constants
        ours = all(n in self.facts.parameters for n in constants)
        if constants and ours and nodes[-len(constants) :] == constants:
            names = [*names[: -len(constants)], f"*SEGMENT_{segment.index}"]
        self.lines += fold(4, "accumulate(", ["gradients", *listed(names), "found"], ")")

    def _backward(self, segment: Any, instruction: Call) -> None:
        self.lines.append("")
        sweeps = self.functions.sweeps_of(segment)
        cotangents = [self._popped(v) for v in instruction.inputs if v.kind is ValueKind.GRADIENT]
        kept = [self.kept[v] for v in instruction.inputs if v in self.kept]
        arguments = [*cotangents, *kept, *self._arguments(segment, sweeps.code)]
        self.lines += fold(4, f"found = {self._function(sweeps, 'backward')}(", arguments, ")")
        self._accumulate(instruction.results, segment)

    def _finish(self) -> None:
        lazy = set(self.executor.parts.lazy)
        results = [
            "None" if k in lazy else self._value(n) if isinstance(n, Node) else repr(n)
            for k, n in enumerate(self.facts.outputs)
        ]
        self.lines.append("")
        for node, value in zip(self.facts.written, self.facts.new_values, strict=True):
            self.lines.append(
                f"{self._value(node)}.copy_({self._value(value)})  # changed in place by the model"
            )
        for position in lazy:
            self.lines.append(f"# output {position} (lazy) is computed when somebody reads it: not printed")
        if self.loss is not None:
            others = [r for r in results if r != self._value(self.loss)]
            if others:
                self.lines.append(remark(4, f"the model's other outputs: {', '.join(others)}"))
            self.lines.append(f"return {self._value(self.loss)}, gradients")
        else:
            self.lines.append(f"return ({', '.join(results)},), gradients")


PRINT: Mapping[type, Callable[[StepCode, Any], None]] = {
    RunPart: StepCode._run_part,
    Call: StepCode._call,
    CallLoss: StepCode._call_loss,
    Group: StepCode._group,
    Again: StepCode._again,
    Layers: StepCode._layers,
    Drop: StepCode._drop,
    Seed: StepCode._seed,
    Differentiate: StepCode._differentiate,
    # written by what comes before or after them: the loss, calls that are given no gradient, the helper
    # `accumulate`, and the last line
    **dict.fromkeys((Linearize, Zeros, Add, HandOver, Return, Defer), StepCode._elsewhere),
    # what is kept stays where it is, and one device has all parameters
    **dict.fromkeys((Leave, Fetch, TakeParameters, GiveBackParameters, ReduceGradients), StepCode._elsewhere),
}
