"""The order of a program and what it makes again: the same bits, effects as before, and a lower peak."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from streambp_fx.passes.cost.program import Memory
from streambp_fx.passes.s5_lower.rematerialize import rematerialize
from streambp_fx.passes.s5_lower.reorder import reorder
from streambp_fx.passes.s5_lower.write_in_place import write_in_place

T = torch.Tensor
Program = Callable[..., Any]


def _inputs(dtype: torch.dtype = torch.float64) -> list[T]:
    generator = torch.Generator().manual_seed(3)
    shapes = (5, 6), (6, 6), (5, 6), (6, 6)
    return [torch.randn(s, dtype=dtype, generator=generator) for s in shapes]


def _traced(program: Program) -> GraphModule:
    return make_fx(program, tracing_mode="symbolic")(*_inputs())


def _run(program: Program) -> tuple[Any, list[T]]:
    """What comes back, and what the inputs are then."""
    given = _inputs()
    torch.manual_seed(7)
    return program(*given), given


def _assert_same(first: Program, second: Program) -> None:
    (want, want_inputs), (got, got_inputs) = _run(first), _run(second)
    for a, b in zip([*want, *want_inputs], [*got, *got_inputs], strict=True):
        assert torch.equal(a, b) and a.dtype == b.dtype and a.stride() == b.stride()


def _peak(module: GraphModule) -> int:
    return max(int(v) for v in Memory(module.graph, _sixes(module)).live_after_each_op())


def _sixes(module: GraphModule) -> dict[Any, int]:
    """Six for each size symbol."""
    return dict.fromkeys((s for n in module.graph.nodes for s in _symbols(n)), 6)


def _symbols(node: torch.fx.Node) -> set[Any]:
    value = node.meta.get("val")
    sizes = value.shape if isinstance(value, T) else ()
    return {s for size in sizes if isinstance(size, torch.SymInt) for s in size.node.expr.free_symbols}


def _names(module: GraphModule) -> list[str]:
    return [str(n.target).removeprefix("aten.") for n in module.graph.nodes if n.op == "call_function"]


# ---- late


def early_product(x: T, w: T, buffer: T, sums: T) -> tuple[T, ...]:
    wide = (x @ w).exp()
    other = (buffer @ w).tanh().t() @ x
    sums.add_(other)
    return (wide.sum(0),)


def read_before_and_after_a_change(x: T, w: T, buffer: T, sums: T) -> tuple[T, ...]:
    before = buffer * 2
    view = buffer[1:]
    buffer.add_(x)
    after = buffer.exp()
    buffer.mul_(3.0)
    return before, view.neg(), after


def random_numbers_stay_in_order(x: T, w: T, buffer: T, sums: T) -> tuple[T, ...]:
    first, second = torch.rand_like(x), torch.rand_like(x)
    sums.add_(second.t() @ buffer)
    return first * 2, second


def sum_over_logits(x: T, w: T, buffer: T, sums: T) -> tuple[T, ...]:
    wide = x @ torch.cat([w, w, w, w], 1)
    total = wide.sum(1)
    sums.add_((wide[:, :6].t() @ buffer).exp())
    return (total,)


PROGRAMS: list[Program] = [
    early_product, read_before_and_after_a_change, random_numbers_stay_in_order, sum_over_logits,
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_another_order_changes_nothing(program: Program) -> None:
    traced = _traced(program)
    reorder(traced.graph)
    traced.graph.lint()
    traced.recompile()
    _assert_same(program, traced)


def test_what_nobody_needs_waits() -> None:
    traced = _traced(early_product)
    before = _peak(traced)
    reorder(traced.graph)
    names = _names(traced)
    assert names.index("add_.Tensor") < names.index("exp.default")
    assert _peak(traced) < before


def test_who_lets_go_of_more_than_it_makes_does_not_wait() -> None:
    traced = _traced(sum_over_logits)
    reorder(traced.graph)
    names = _names(traced)
    assert names.index("sum.dim_IntList") < names.index("exp.default")


def test_dead_ops_go() -> None:
    traced = _traced(lambda x, w, buffer, sums: ((x * 2).sum(),))
    with traced.graph.inserting_before(next(n for n in traced.graph.nodes if n.op == "output")):
        first = next(n for n in traced.graph.nodes if n.op == "placeholder")
        traced.graph.call_function(torch.ops.aten.exp.default, (first,)).meta["val"] = first.meta["val"]
    reorder(traced.graph)
    assert "exp.default" not in _names(traced)


# ---- rematerialize


def norm_and_gradient(x: T, w: T, buffer: T, sums: T) -> tuple[T, ...]:
    """A value that is read, through a view, before and after the widest place."""
    normed = x * buffer
    wide = normed @ torch.cat([w] * 20, 1)
    gradient = (wide.tanh() * wide) @ torch.cat([w] * 20, 1).t()
    sums.add_(gradient.t() @ normed.view(-1, 6))
    return (gradient,)


def two_norms(x: T, w: T, buffer: T, sums: T) -> tuple[T, ...]:
    """The operand of a value that is made again is made again as well."""
    normed = x * buffer
    scaled = normed * 2.0
    wide = scaled @ torch.cat([w] * 20, 1)
    gradient = (wide.tanh() * wide) @ torch.cat([w] * 20, 1).t()
    sums.add_(gradient.t() @ scaled)
    return (gradient * normed,)


def changed_operand(x: T, w: T, buffer: T, sums: T) -> tuple[T, ...]:
    scaled = x * buffer
    wide = scaled @ torch.cat([w] * 20, 1)
    buffer.add_(1.0)
    return wide.tanh().sum(1), scaled.t() @ x


def random_value(x: T, w: T, buffer: T, sums: T) -> tuple[T, ...]:
    noise = torch.rand_like(x)
    wide = (x + noise) @ torch.cat([w] * 20, 1)
    return wide.tanh().sum(1), noise.t() @ x


def returned_value(x: T, w: T, buffer: T, sums: T) -> tuple[T, ...]:
    scaled = x * buffer
    wide = scaled @ torch.cat([w] * 20, 1)
    return wide.tanh().sum(1), scaled


@pytest.mark.parametrize(("program", "again"), [(norm_and_gradient, 1), (two_norms, 2)])
def test_a_value_is_made_again(program: Program, again: int) -> None:
    traced = _traced(program)
    before, products = _peak(traced), _names(traced).count("mul.Tensor")
    rematerialize(traced.graph, _sixes(traced))
    traced.graph.lint()
    traced.recompile()
    assert _names(traced).count("mul.Tensor") == products + again
    assert before - _peak(traced) == again * 6 * 6 * 8
    _assert_same(program, traced)


@pytest.mark.parametrize("program", [changed_operand, random_value, returned_value], ids=lambda p: p.__name__)
def test_what_is_not_made_again(program: Program) -> None:
    traced = _traced(program)
    names = _names(traced)
    rematerialize(traced.graph, _sixes(traced))
    assert _names(traced) == names
    traced.recompile()
    _assert_same(program, traced)


# ---- any program

UNARY = (
    torch.exp,
    torch.tanh,
    torch.neg,
    lambda v: v * 0.5,
    lambda v: v + v,
    lambda v: v.view(-1).view(5, 6),
)
Step = tuple[int, int, int]


def _program(steps: list[Step], returned: int) -> Program:
    """A program of ops that `steps` name, over values that were made before; they stay small."""

    def run(x: T, w: T, buffer: T, sums: T) -> tuple[T, ...]:
        values = [x.clone(), (x @ w).tanh()]
        for kind, first, second in steps:
            a, b = values[first % len(values)], values[second % len(values)]
            if kind < len(UNARY):
                values.append(UNARY[kind](a).tanh())
            elif kind == len(UNARY):
                values.append((a * b).tanh())
            elif kind == len(UNARY) + 1:
                values.append((a @ w).tanh())
            elif kind == len(UNARY) + 2:
                values.append((torch.cat([a, b], 1) @ torch.cat([w, w], 0)).tanh())
            elif kind == len(UNARY) + 3:
                sums.add_(a.t() @ b)
            elif kind == len(UNARY) + 4:
                buffer.narrow(0, first % 4, 2).add_(a[:2])
            elif kind == len(UNARY) + 5:
                values.append(buffer.tanh() + a)
            else:
                values.append(a - a.sum(1, keepdim=True).tanh())
        return tuple(values[(returned + k) % len(values)] * 1.5 for k in range(2))

    return run


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.tuples(st.integers(0, len(UNARY) + 6), st.integers(0, 50), st.integers(0, 50)), max_size=25),
    st.integers(0, 50),
)
def test_any_program_gives_the_same_bits(steps: list[Step], returned: int) -> None:
    program = _program(steps, returned)
    traced = _traced(program)
    traced.graph.eliminate_dead_code()
    reorder(traced.graph)
    before = _peak(traced)
    rematerialize(traced.graph, _sixes(traced))
    traced.graph.lint()
    assert _peak(traced) <= before
    write_in_place(traced.graph)
    traced.recompile()
    _assert_same(program, traced)
