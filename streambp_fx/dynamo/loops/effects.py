"""Compares what is run behind two graphs of one function: results, and effects on Python objects."""

from __future__ import annotations

import dis
import re
import types


class NotComparable(Exception):
    """Scans cannot be compared with their loops."""


def compare_effects(code: types.CodeType, other: types.CodeType | None) -> None:
    """What is run after the graph must be the same: what is returned, and effects on Python objects.

    Raises:
        NotComparable: it is not.
    """
    assert other is not None
    if _after_graph(code) != _after_graph(other):
        raise NotComparable("what it does to Python objects, or what it returns, is not the same")


def _after_graph(code: types.CodeType) -> list[tuple[str, str]]:
    """Instructions behind the call of the graph: their names, and what they are given.

    Raises:
        NotComparable: no graph is called.
    """
    instructions = list(dis.get_instructions(code))
    graph = [k for k, x in enumerate(instructions) if "__compiled_fn" in str(x.argval)]
    taken = [k for k, x in enumerate(instructions) if graph and k > graph[-1] and _takes_results(x)]
    if not taken:
        raise NotComparable("no graph of it is called")
    start, names = instructions[taken[0]].offset, dict[str, str]()

    def given(x: dis.Instruction) -> str:
        if x.opcode in (*dis.hasjrel, *dis.hasjabs):
            return str(x.argval - start)
        text = x.argrepr if isinstance(x.argval, str) else repr(x.argval)
        for pattern in _NUMBERED:
            text = re.sub(pattern, lambda m: names.setdefault(m[0], f"{m[1]}_{len(names)}"), text)
        return text

    return [(x.opname, given(x)) for x in instructions[taken[0] :]]


# Names that Dynamo gives by numbers of its own: of variables, of graphs, of objects.
_NUMBERED = (
    r"\b(tmp|graph_out)_\d+",
    r"\b(\w+?)_\d+_[0-9a-f_]{36}",
    r"\b(\w+?)_\d+_c\d+\b",
    r"\b(0x)[0-9a-f]+",
)


def _takes_results(instruction: dis.Instruction) -> bool:
    kept = instruction.opname == "STORE_FAST" and str(instruction.argval).startswith("graph_out")
    return kept or instruction.opname == "UNPACK_SEQUENCE"
