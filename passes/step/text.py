"""text: a procedure for people, and for other programs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from fractions import Fraction
from typing import Any

from torch.fx import Node

from ..graph.facts import shape_of, sum_dtype, tensors_of
from .instructions import (
    DEVICE,
    AllGather,
    Allocate,
    Buffer,
    BufferKind,
    Chunks,
    Free,
    Hand,
    Instruction,
    Keep,
    Normalize,
    Overwrite,
    Receive,
    ReduceScatter,
    Roll,
    Round,
    Run,
    Scale,
    Send,
    WriteRows,
    ZeroRows,
)
from .procedure import Procedure
from .saving import ALL


def text(procedure: Procedure) -> str:
    """The instructions, one a line.

    Constants of the segment, which programs take all, are left out; their gradients are counted: "8 sums".
    """
    given = [b for b in procedure.parameters if b.kind is not BufferKind.CONSTANT]
    head = f"{procedure.name}({_names(given)}) -> {_names(procedure.results)}:"
    lines = [f"a chunk at a time: {_names(procedure.passing)}"] if procedure.passing else []
    return "\n".join([head, *(f"    {line}" for line in (*lines, *_lines(procedure.body)))])


def line(instruction: Instruction) -> str:
    """An instruction in one line; of a loop, its head."""
    return LINES[type(instruction)](instruction)


def to_json(procedure: Procedure) -> dict[str, Any]:
    """A procedure as dicts, lists, strings, numbers and booleans; buffers by name."""
    buffers = {b.name: _described(b) for b in _buffers(procedure)}
    return {
        "name": procedure.name,
        "parameters": [b.name for b in procedure.parameters],
        "results": [b.name for b in procedure.results],
        "passing": [b.name for b in procedure.passing],
        "buffers": buffers,
        "body": [_plain(i) for i in procedure.body],
    }


def _lines(body: Iterable[Instruction]) -> Iterator[str]:
    for _, group in itertools.groupby(body, key=_of_a_sum):
        same = list(group)
        if len(same) > 1 and _of_a_sum(same[0]):
            zeros = ", zeros" if isinstance(same[0], Allocate) else ""
            yield f"{type(same[0]).__name__.lower()} {len(same)} sums{zeros}"
            continue
        for instruction in same:
            yield line(instruction)
            if isinstance(instruction, Chunks):
                yield from (f"    {inner}" for inner in _lines(instruction.body))


def _of_a_sum(instruction: Instruction) -> type | None:
    """What is done to the gradient of a constant, if it is that."""
    buffer = getattr(instruction, "buffer", None)
    return type(instruction) if buffer is not None and buffer.kind is BufferKind.SUM else None


def _names(buffers: Iterable[Buffer]) -> str:
    """Names, the sums counted where there are several."""
    found = list(buffers)
    sums = [b for b in found if b.kind is BufferKind.SUM]
    names = [b.name for b in found if b not in sums or len(sums) == 1]
    return ", ".join([*names, f"{len(sums)} sums"] if len(sums) > 1 else names)


def _described(buffer: Buffer) -> dict[str, Any]:
    if buffer.node is None:
        return {"kind": buffer.kind.name.lower()}
    dtype = str(tensors_of(buffer.node)[0].dtype).removeprefix("torch.")
    shape = [str(size) for size in shape_of(buffer.node)]
    return {"kind": buffer.kind.name.lower(), "shape": shape, "dtype": dtype, "wide": buffer.wide}


def _buffers(procedure: Procedure) -> list[Buffer]:
    """All buffers, in the order in which they are met."""
    own = (getattr(i, "buffer", None) for i in procedure.body)
    every = (*procedure.parameters, *own, *procedure.results, *procedure.passing)
    return [b for b in dict.fromkeys(every) if b is not None]


def _plain(value: Any) -> Any:
    """A part of an instruction, without what JSON has not."""
    if isinstance(value, Buffer):
        return value.name
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Fraction):
        return str(value)
    if dataclasses.is_dataclass(value):
        fields = {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"instruction": type(value).__name__, **fields}
    assert not isinstance(value, Node)
    return value


def _allocate(instruction: Allocate) -> str:
    buffer, filled = instruction.buffer, ", zeros" if instruction.zero else ""
    assert buffer.node is not None
    dtype = tensors_of(buffer.node)[0].dtype
    held = str(sum_dtype(dtype) if buffer.wide else dtype).removeprefix("torch.")
    shape = ", ".join(map(str, shape_of(buffer.node)))
    rows = ", rows of this device" if instruction.own else ""
    return f"allocate {buffer.name}: {held}[{shape}]{rows}{filled}{_place(instruction)}"


def _place(instruction: Allocate | Overwrite) -> str:
    words = {DEVICE: "", "host": ", in host memory"}
    return words.get(instruction.place, f", on {instruction.place}")


def _run(instruction: Run) -> str:
    read = [b for b in instruction.inputs if b.kind is not BufferKind.CONSTANT and b not in instruction.adds]
    words = f"run {instruction.program}({_names(read)})"
    words += f" -> {_names(instruction.results)}" if instruction.results else ""
    writes = f", writes {_names(instruction.writes)}" if instruction.writes else ""
    adds = f", adds to {_names(instruction.adds)}" if instruction.adds else ""
    finishes = f", finishes {_names(instruction.finishes)}" if instruction.finishes else ""
    writes += f", writes {_names(instruction.rewrites)} again" if instruction.rewrites else ""
    saved = "" if instruction.price is None else f", saved: {instruction.price}"
    columns = ", columns of its own rows" if instruction.own else ""
    columns += ", columns of other devices block by block" if instruction.by_blocks else ""
    return f"{words}{writes}{adds}{finishes}{columns}{saved}"


def _chunks(loop: Chunks) -> str:
    reverse = ", in reverse" if loop.reverse else ""
    share = "" if loop.share == ALL else f", {loop.share[0]} to {loop.share[1]} of the sequence"
    return f"for chunks of rows {loop.over.value}{share}{reverse}:"


def _neighbour(buffer: Buffer, receives: bool) -> str:
    """States go from the first rows to the last ones, and gradients back."""
    return "before" if (buffer.kind is BufferKind.STATE) is receives else "behind"


LINES: Mapping[type, Callable[[Any], str]] = {
    Allocate: _allocate,
    Overwrite: lambda i: f"overwrite {i.old.name} with {i.buffer.name}{_place(i)}",
    Free: lambda i: f"free {i.buffer.name}",
    Chunks: _chunks,
    Run: _run,
    WriteRows: lambda i: f"{'add to' if i.add else 'write'} rows of {i.buffer.name}",
    Roll: lambda i: f"let go of the columns of {i.buffer.name} that the chunk does not read",
    Hand: lambda i: f"hand on {i.buffer.name}",
    ZeroRows: lambda i: f"zero rows of {i.buffer.name}",
    Keep: lambda i: f"keep {i.buffer.name}",
    Normalize: lambda i: f"normalize {i.buffer.name}",
    Scale: lambda i: f"scale {i.buffer.name}",
    Round: lambda i: f"round {i.buffer.name}",
    AllGather: lambda i: f"all-gather rows of {i.buffer.name}",
    ReduceScatter: lambda i: f"reduce-scatter rows of {i.buffer.name}{' of the others' if i.others else ''}",
    Receive: lambda i: f"receive {i.buffer.name} from the device {_neighbour(i.buffer, True)}",
    Send: lambda i: f"send {i.buffer.name} to the device {_neighbour(i.buffer, False)}",
}
