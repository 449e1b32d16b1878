"""text: a step program for people, and for other programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Any

from torch.fx import Node

from ..step.instructions import Buffer
from ..step.text import text, to_json
from .program import (
    Add,
    Again,
    Call,
    CallLoss,
    ChunksFirst,
    CollectRows,
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
    SumShares,
    TakeParameters,
    Zeros,
)
from .program.values import DEVICE, Value, ValueKind

GRADIENTS = (ValueKind.GRADIENT, ValueKind.UNSCALED)
#: Values that are named in a line; of more the rest is counted.
NAMED = 6


class Naming:
    """What values are called in a text.

    Args:
        program: what is given by the caller is left out where it is read.
        names: of nodes, where they are called otherwise than in the captured graph: parameters by their path.
    """

    def __init__(self, program: StepProgram | None = None, names: Mapping[Node, str] | None = None) -> None:
        self.given = frozenset(() if program is None else program.given)
        self.nodes = frozenset(v.node for v in self.given)
        self.names = {} if names is None else names

    def of(self, value: Value) -> str:
        """The name of one value."""
        name = value.name
        if value.node is not None and value.node in self.names:
            name = name.replace(value.node.name, self.names[value.node], 1)
        return name

    def made(self, values: Iterable[Value]) -> str:
        """Names, in a row; of many the rest is counted, and gradients of what is given are."""
        found = list(values)
        counted = [v for v in found if v.kind in GRADIENTS and v.node in self.nodes]
        if len(counted) <= 2:
            return self._row([self.of(v) for v in found])
        names = [self.of(v) for v in found if v not in counted]
        return self._row([*names, f"{len(counted)} gradients of parameters"])

    def read(self, values: Iterable[Value]) -> str:
        """The same, without what is given."""
        return self.made(v for v in values if v not in self.given)

    def _row(self, names: list[str]) -> str:
        if len(names) <= NAMED:
            return ", ".join(names)
        return ", ".join([*names[: NAMED - 1], f"{len(names) - NAMED + 1} more"])


def step_text(program: StepProgram, names: Mapping[Node, str] | None = None, procedures: bool = True) -> str:
    """The instructions of a step, one a line, then the procedures that it calls, each once.

    What is given (parameters, tokens) is left out where it is read. Of a loop over layers the first round is
    shown.

    Args:
        names: see `Naming`.
        procedures: False for the step alone.
    """
    naming, lines = Naming(program, names), []
    for name in ("prologue", "forward", "backward"):
        body = getattr(program, name)
        if body:
            lines += [f"{name}:", *(f"    {line}" for line in _lines(body, naming))]
    if procedures:
        for title, procedure in named_procedures(program).items():
            lines += ["", *f"{title}: {text(procedure)}".split("\n")]
    return "\n".join(lines)


def step_line(instruction: StepInstruction, naming: Naming | None = None) -> str:
    """An instruction in one line; of a loop or a group, its head."""
    return LINES[type(instruction)](instruction, naming or Naming())


def named_procedures(program: StepProgram) -> dict[str, Any]:
    """The procedures of a step, by the first segment that they serve: "forward of segment 1"."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for call in program.calls():
        if id(call.procedure) not in seen:
            seen.add(id(call.procedure))
            found[f"{call.procedure_name} of segment {call.segment}"] = call.procedure
    return found


def step_to_json(program: StepProgram) -> dict[str, Any]:
    """A step as dicts, lists, strings and numbers: values by name, procedures by title."""
    procedures = named_procedures(program)
    titles = {id(p): title for title, p in procedures.items()}
    return {
        "given": [v.name for v in program.given],
        "returned": [v.name for v in program.returned],
        "gradients": [v.name for v in program.gradients],
        "groups": [[v.name for v in group] for group in program.groups],
        "prologue": [_plain(i, titles) for i in program.prologue],
        "forward": [_plain(i, titles) for i in program.forward],
        "backward": [_plain(i, titles) for i in program.backward],
        "procedures": {title: to_json(p) for title, p in procedures.items()},
    }


def _plain(instruction: StepInstruction, titles: dict[int, str]) -> dict[str, Any]:
    """An instruction by its fields, but for what is a graph; what is not there, or not so, is left out."""
    found: dict[str, Any] = {"instruction": type(instruction).__name__}
    for name in (f.name for f in dataclasses.fields(instruction)):
        if name not in ("part", "programs", "procedure_name"):
            value = _part_of(getattr(instruction, name), titles)
            if value is not None and value is not False:
                found[name] = value
    if isinstance(instruction, Call):
        found["procedure"] = titles[id(instruction.procedure)]
        if instruction.procedure_name != "scaling":
            found["chunks"] = str(instruction.chunks)
    return found


def _part_of(value: Any, titles: dict[int, str]) -> Any:
    """A field of an instruction as what JSON has."""
    if isinstance(value, StepInstruction):
        return _plain(value, titles)
    if isinstance(value, Value | Buffer):
        return value.name
    if isinstance(value, tuple):
        return [_part_of(v, titles) for v in value]
    if isinstance(value, frozenset):
        return sorted(_part_of(v, titles) for v in value)
    if isinstance(value, Fraction):
        return str(value)
    if dataclasses.is_dataclass(value):
        return {f.name: _part_of(getattr(value, f.name), titles) for f in dataclasses.fields(value)}
    return value


def _lines(body: Iterable[StepInstruction], naming: Naming) -> Iterator[str]:
    for instruction in body:
        yield step_line(instruction, naming)
        bodies = instruction.bodies[: 1 if isinstance(instruction, Layers) else None]
        yield from (f"    {line}" for body in bodies for line in _lines(body, naming))


def _made(instruction: StepInstruction, naming: Naming) -> str:
    return f" -> {naming.made(instruction.results)}" if instruction.results else ""


def _kept_at(instruction: Any) -> str:
    return "" if instruction.place == DEVICE else f", keeps what its backward reads on {_place(instruction)}"


def _place(instruction: Any) -> str:
    return "the host" if instruction.place == "host" else str(instruction.place)


def _part(instruction: RunPart | Differentiate) -> str:
    return instruction.name if instruction.segment is None else f"segment {instruction.segment}, unchunked"


def _run_part(instruction: RunPart, naming: Naming) -> str:
    read = naming.read(instruction.inputs)
    recorded = ", recorded if it is run again" if instruction.recorded else ""
    return f"run {_part(instruction)}({read}){_made(instruction, naming)}{_kept_at(instruction)}{recorded}"


def _differentiate(instruction: Differentiate, naming: Naming) -> str:
    return (
        f"differentiate {_part(instruction)}({naming.read(instruction.inputs)}){_made(instruction, naming)}"
    )


def _call(instruction: Call, naming: Naming) -> str:
    what = f"{instruction.procedure_name} of segment {instruction.segment}"
    read = naming.read(instruction.inputs)
    chunks = "" if instruction.procedure_name == "scaling" else f", {instruction.chunks} chunks"
    return f"call {what}({read}){_made(instruction, naming)}{chunks}{_kept_at(instruction)}"


def _call_loss(instruction: CallLoss, naming: Naming) -> str:
    what = f"loss of segment {instruction.segment} and epilogue"
    read, made = naming.read(instruction.inputs), _made(instruction, naming)
    return f"call {what}({read}){made}, {instruction.chunks} chunks"


def _group(instruction: Group, naming: Naming) -> str:
    where = "" if instruction.place == DEVICE else f", on {_place(instruction)}"
    read = naming.read(instruction.inputs) or "what is given"
    return f"keep of what follows only {read}{where}:"


def _chunks_first(instruction: ChunksFirst, naming: Naming) -> str:
    reverse = ", from the last to the first" if instruction.again else ""
    return f"for each chunk{reverse}, all of what follows{_made(instruction, naming)}:"


def _layers(instruction: Layers, naming: Naming) -> str:
    return f"for each of {len(instruction.rounds)} layers, of which this is the first:"


def _leave(instruction: Leave, naming: Naming) -> str:
    return f"wait until {naming.made(instruction.inputs)} left the device"


def _add(instruction: Add, naming: Naming) -> str:
    part, (total,) = instruction.inputs[-1], instruction.results
    own, sum_of = naming.of(part), naming.of(total)
    return f"{own} begins {sum_of}" if len(instruction.inputs) == 1 else f"add {own} to {sum_of}"


def _hand_over(instruction: HandOver, naming: Naming) -> str:
    return f"hand over {naming.made(instruction.inputs)}"


def _take_parameters(instruction: TakeParameters, naming: Naming) -> str:
    own = f"parameters of group {instruction.group} ({naming.made(instruction.inputs)})"
    return f"{own} are still there" if instruction.there else f"gather {own}{_by_whom(instruction)}"


def _give_back_parameters(instruction: GiveBackParameters, naming: Naming) -> str:
    own = f"parameters of group {instruction.group} ({naming.made(instruction.inputs)})"
    return (
        f"{own} stay until the backward" if instruction.stays else f"give back {own}{_by_whom(instruction)}"
    )


def _by_whom(instruction: TakeParameters | GiveBackParameters) -> str:
    return ", around the call of the model" if instruction.of_caller else ""


def _reduce_gradients(instruction: ReduceGradients, naming: Naming) -> str:
    whose = f"group {instruction.group}" if instruction.bucket is None else f"bucket {instruction.bucket}"
    return f"sum over the devices the gradients of {whose} ({naming.made(instruction.inputs)})"


LINES: Mapping[type, Callable[[Any, Naming], str]] = {
    RunPart: _run_part,
    Differentiate: _differentiate,
    Linearize: lambda i, naming: f"derive the loss at zero({naming.read(i.inputs)}){_made(i, naming)}",
    Call: _call,
    CallLoss: _call_loss,
    Group: _group,
    ChunksFirst: _chunks_first,
    Again: lambda i, naming: "run again:",
    Layers: _layers,
    Leave: _leave,
    Fetch: lambda i, naming: f"fetch {naming.made(i.inputs)}",
    Drop: lambda i, naming: f"drop {naming.made(i.inputs)}",
    Defer: lambda i, naming: f"when it is read: {naming.made(i.results)} from {naming.read(i.inputs)}",
    Return: lambda i, naming: f"return {naming.made(i.inputs)}",
    Seed: lambda i, naming: f"take {naming.made(i.results)} from the caller",
    Zeros: lambda i, naming: f"zeros for {naming.made(i.results)}",
    Add: _add,
    HandOver: _hand_over,
    CollectRows: lambda i, naming: f"all-gather rows of {naming.made(i.inputs)}",
    SumShares: lambda i, naming: f"all-reduce {naming.made(i.inputs)}",
    TakeParameters: _take_parameters,
    GiveBackParameters: _give_back_parameters,
    ReduceGradients: _reduce_gradients,
}
