"""vjp: a chunk's program and its joint vector-Jacobian product as one graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch
import torch.nn.functional as F
from golden import check_golden
from golden_graphs import (
    ALL,
    FIRST,
    LATER,
    Small,
    ids,
    listed,
    needs_symbols,
    sections,
    source,
    stages,
    traced,
    traced_text,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from streambp_fx.passes.s4_trace.program_inputs import Extent
from streambp_fx.passes.s4_trace.vjp import Traced
from streambp_fx.passes.s5_lower.programs import SegmentPrograms

aten = torch.ops.aten
pytestmark = needs_symbols


def programs_of(function: Callable[..., Any], frozen: tuple[str, ...] = ()) -> SegmentPrograms:
    """The programs of the second segment of a function, the first being the embedding."""
    module = Small(function)
    for name in frozen:
        module.get_parameter(name).requires_grad_(False)
    facts = stages(module, ids()).facts
    assert facts.segments[1].chunked, facts.segments[1].reason
    return SegmentPrograms(facts, facts.segments[1])


def compared(
    function: Callable[..., Any],
    name: str,
    kind: str = "joint",
    extent: Extent = LATER,
    frozen: tuple[str, ...] = (),
) -> tuple[SegmentPrograms, Traced]:
    """Compare the trace of a kind of program with its golden file."""
    programs = programs_of(function, frozen)
    program = traced(programs, kind, extent)
    notes = [
        f"values: {program.values}, then gradients of {listed(n.name for n in programs.diff_rows)}",
        f"assumed of the sizes: {listed(_conditions(program))}",
    ]
    text = sections(source(function), (kind, traced_text(programs, kind, extent)), "\n".join(notes))
    check_golden(text, __file__, f"vjp_{name}")
    return programs, program


def _conditions(program: Traced) -> list[Any]:
    names = {s: sympy.Symbol(n) for s, n in program.guards.names.items()}
    return sorted((c.xreplace(names) for c in program.guards.conditions()), key=str)


def results(program: Traced) -> list[Any]:
    return list(program.module.graph.output_node().args[0])  # type: ignore[arg-type]


def added(program: Traced) -> int:
    """How many gradients are added to those of states."""
    return len(program.module.graph.find_nodes(op="call_function", target=aten.add_.Tensor))


def by_rows(m: Small, ids: Tensor) -> Tensor:
    return (m.first(m.embed(ids)).relu() * m.bias).square().mean()


def test_values_then_gradients_of_rows_and_of_parameters() -> None:
    programs, program = compared(by_rows, "rows")
    assert program.values == 1 and len(results(program)) == 1 + 1 + 2
    assert len(programs.diff_rows) == 1 and len(programs.diff_constants) == 2


def test_no_gradient_of_what_is_frozen() -> None:
    programs, program = compared(by_rows, "frozen", frozen=("first.weight",))
    assert len(programs.diff_constants) == 1 and len(results(program)) == 1 + 1 + 1


class NoRelu(TorchDispatchMode):
    """Every `relu` is zero."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return torch.zeros_like(found) if func is aten.relu.default else found


def test_the_modes_of_the_first_step_are_not_in_the_program() -> None:
    """All later steps run it, too."""
    programs, within = programs_of(by_rows), programs_of(by_rows)
    with NoRelu():
        traced(within, "joint", LATER)
    assert traced_text(within, "joint") == traced_text(programs, "joint")


def causal(m: Small, ids: Tensor) -> Tensor:
    x = m.embed(ids)
    q, k = x.unsqueeze(1), m.first(x).unsqueeze(1)
    return m.head(x + F.scaled_dot_product_attention(q, k, q, is_causal=True).squeeze(1))


def test_attention_adds_to_the_gradients_of_the_states() -> None:
    """And the own rows of these, finished by later chunks, are differentiated further."""
    programs, program = compared(causal, "causal_first", extent=FIRST)
    assert len(programs.states) == added(program) == 2


def of_all(m: Small, ids: Tensor) -> Tensor:
    x = m.embed(ids)
    weights = (x @ m.first(x).transpose(1, 2)).softmax(-1)
    return m.head(x + weights @ x)


def test_where_all_rows_are_read_the_states_are_leaves() -> None:
    """Their own rows are differentiated in a program of their own, once the gradient is complete."""
    _, program = compared(of_all, "all_rows", extent=ALL)
    _, states = compared(of_all, "all_rows_states", "state_joint", ALL.own())
    assert (added(program), added(states)) == (2, 0)
