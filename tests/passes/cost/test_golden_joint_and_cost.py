"""joint: a part that runs unchunked, with its VJP. cost: what is alive after each op, and the work of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch
import torch.nn.functional as F
from golden import check_golden
from golden_graphs import (
    LATER,
    Small,
    Words,
    ids,
    listed,
    lowered,
    lowered_words,
    needs_symbols,
    sections,
    source,
    stages,
)
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from streambp_fx.passes.cost.autograd_live import UnchunkedStep
from streambp_fx.passes.cost.program import Memory, ProgramCost, largest, program_cost
from streambp_fx.passes.graph.sources import path
from streambp_fx.passes.graph.subgraph import Subgraph
from streambp_fx.passes.s5_lower.programs import SegmentPrograms

aten = torch.ops.aten
ROWS, T = sympy.Symbol("rows", integer=True, positive=True), sympy.Symbol("T", integer=True, positive=True)


def cost_text(module: GraphModule, words: Words, sizes: Any, cost: ProgramCost, **options: Any) -> str:
    """A program with the bytes that are alive after each op, and what it costs as a whole."""
    memory = Memory(module.graph, sizes, **options)
    alive = dict(zip(module.graph.nodes, memory.live_after_each_op(), strict=True))
    ops = listed(sorted(f"{n} {op}" for op, n in cost.ops.items() if "getitem" not in op))
    lines = [
        words.graph(module.graph, lambda node: f"alive: {alive[node]}"),
        "",
        f"peak: {listed(sorted(map(str, cost.peaks)))} bytes over the inputs",
        f"outputs: {cost.outputs} bytes",
        f"kept for the backward: {'-' if cost.kept is None else f'{cost.kept} bytes'}",
        f"operations of products: {cost.flops}",
        f"ops: {ops}",
    ]
    return "\n".join(lines)


# ---- programs by liveness


def counted(
    function: Callable[..., Any], name: str, returned: int | None = None, throughout: Any = None
) -> ProgramCost:
    """Compare the cost of a function of (x, weight), of any number of rows, with its golden file."""
    given = torch.ones(5, 4, dtype=torch.float64), torch.ones(4, 4, dtype=torch.float64)
    module = make_fx(function, tracing_mode="symbolic")(*given)
    inputs = [n for n in module.graph.nodes if n.op == "placeholder"]
    symbols = sorted(inputs[0].meta["val"].shape[0].node.expr.free_symbols, key=str)
    width = inputs[1].meta["val"].shape[0].node.expr
    sizes = {symbols[0]: ROWS, width: sympy.Integer(4)}
    (kept,) = module.graph.find_nodes(op="call_function", target=throughout) if throughout else (None,)
    cost = program_cost(module, sizes, returned, throughout=kept)
    words = Words({symbols[0]: "rows", width: "width"}, dict(zip(inputs, ("x", "weight"), strict=True)))
    text = cost_text(module, words, sizes, cost, throughout=kept)
    check_golden(sections(source(function), text), __file__, f"cost_{name}")
    return cost


def chain(x: Tensor, weight: Tensor) -> Tensor:
    y = (x @ weight).exp()
    z = y.view(-1)
    return z.sin().sum()


def test_a_value_lives_until_its_last_view_is_read() -> None:
    cost = counted(chain, "chain")
    assert cost.peak == 64 * ROWS and cost.flops == 32 * ROWS and cost.kept is None


def in_place(x: Tensor, weight: Tensor) -> Tensor:
    y = x @ weight
    y.add_(x)
    weight.t().addmm_(x.t(), y)
    return y.mul_(2)


def test_what_is_written_over_takes_no_memory() -> None:
    cost = counted(in_place, "in_place")
    assert cost.peak == cost.outputs == 32 * ROWS and cost.flops == 64 * ROWS


def both_halves(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ weight
    value = y.exp()
    return value.sum(), (value * y).t() @ x


def test_what_the_backward_half_reads_is_kept() -> None:
    assert counted(both_halves, "both_halves", returned=1).kept == 64 * ROWS


def test_a_workspace_is_there_from_the_first_op_to_the_last() -> None:
    cost = counted(chain, "workspace", throughout=aten.mm.default)
    assert cost.peak >= 64 * ROWS


def attention(m: Small, ids: Tensor) -> Tensor:
    x = m.embed(ids)
    k, v = m.heads(m.first(x), 1), m.heads(x, 1)
    x = x + F.scaled_dot_product_attention(m.heads(x, 1), k, v, is_causal=True).flatten(1, 2)
    return m.head(x)


@needs_symbols
def test_attention_costs_scores_of_the_prefix_and_half_of_the_own_block() -> None:
    facts = stages(Small(attention), ids()).facts
    programs = SegmentPrograms(facts, facts.segments[1])
    program = lowered(programs, "forward", LATER)
    names = {s: sympy.Symbol(n, integer=True, positive=True) for s, n in program.sizes.items()}
    cost = program_cost(program.module, names)
    text = cost_text(program.module, lowered_words(programs, program), names, cost)
    check_golden(sections(source(attention), text), __file__, "cost_attention")
    prefix = next(s for s in names.values() if str(s) == "prefix")
    per_pair = 2 * 2 * (8 + 8)  # samples, then scores and their product with the values
    assert sympy.expand(cost.flops.coeff(prefix)) == per_pair * ROWS


def test_the_largest_of_some_sizes() -> None:
    """Those stay of which none is certain to be the largest."""
    a, b = sympy.symbols("a b", integer=True, positive=True)
    assert set(largest([a, 2 * a, a + b, 3 * b])) == {2 * a, a + b, 3 * b}


# ---- parts that run unchunked


def run_whole(
    function: Callable[..., Any], name: str, backward: bool = True, cut: str = ""
) -> tuple[UnchunkedStep, GraphModule]:
    """Compare forward and VJP of the unchunked segment, up to the op `cut`, with its golden file."""
    facts = stages(Small(function), ids()).facts
    segment = next(s for s in facts.segments if not s.chunked)
    outputs = [n for n in segment.nodes if n.name == cut] or segment.outputs
    step = UnchunkedStep(facts, Subgraph(facts, outputs, set(segment.rows)), backward)
    module, values = step.traced()
    sizes = {s: T if own == facts.sequence else own for s, own in step.symbols.items()}
    live = [v.subs(sizes) for v in map(sympy.sympify, step.live())]
    words = Words({s: str(n) for s, n in sizes.items()}, _names(step, module))
    held = listed(map(str, largest(live)))
    notes = f"values: {values}\npeak as autograd holds it: {held} bytes over the inputs"
    text = sections(source(function), words.graph(module.graph, dead=False), notes)
    check_golden(text, __file__, f"joint_{name}")
    return step, module


def _names(step: UnchunkedStep, module: GraphModule) -> dict[Node, str]:
    """Inputs are those of the part, then the gradients that come to its outputs."""
    given = [path(n) if n.op == "placeholder" else n.name for n in step.part.inputs]
    coming = [f"grad_{step.part.outputs[k].name}" for k in step.outputs] if step.backward else []
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    return dict(zip(placeholders, [*given, *coming], strict=True))


def turned(m: Small, ids: Tensor) -> Tensor:
    x = m.first(m.embed(ids)).relu()
    return m.head((x.flip(1) * m.bias).exp())


def test_forward_and_vjp_of_a_segment_that_runs_whole() -> None:
    step, module = run_whole(turned, "segment")
    assert step.backward and len(module.graph.output_node().args[0]) > len(step.part.outputs)


def test_the_forward_alone() -> None:
    step, module = run_whole(turned, "forward", backward=False)
    assert not step.backward and len(module.graph.output_node().args[0]) == len(step.part.outputs)


def without_gradients(m: Small, ids: Tensor) -> Tensor:
    x = m.embed(ids)
    with torch.no_grad():
        y = m.first(x).flip(1).sigmoid()
    return m.head(x) * y.sum(-1, keepdim=True)


def test_there_is_no_vjp_where_no_gradient_passes() -> None:
    step, module = run_whole(without_gradients, "without_gradients", cut="sigmoid")
    assert not step.backward and len(module.graph.output_node().args[0]) == 1
