"""lower: a traced program as it is run, with the gradients of parameters added to their sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from golden import check_golden
from golden_graphs import (
    FIRST,
    Small,
    Words,
    ids,
    lowered,
    lowered_text,
    needs_symbols,
    sections,
    source,
    stages,
    traced_text,
)
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from streambp_fx.passes.graph.facts import sum_dtype
from streambp_fx.passes.s5_lower.lower import LoweringSettings, lower
from streambp_fx.passes.s5_lower.programs import SegmentPrograms

aten = torch.ops.aten
NAMES = ["x", "gradient", "total"]


def compared(function: Callable[..., Any], name: str, dtype: torch.dtype = torch.float64) -> list[Any]:
    """Compare a program whose last result is added to `total` with its golden file, before and after."""
    inputs = [
        torch.ones(s, dtype=d) for s, d in (((5, 3), dtype), ((5, 4), dtype), ((4, 3), sum_dtype(dtype)))
    ]
    module = make_fx(function, tracing_mode="fake")(*inputs)
    given = [n for n in module.graph.nodes if n.op == "placeholder"]
    words = Words({}, dict(zip(given, NAMES, strict=True)))
    before = words.graph(module.graph)
    found = lower(module, LoweringSettings("a test", 1, NAMES)).module
    after = words.graph(found.graph)
    check_golden(
        sections(source(function), ("traced", before), ("lowered", after)), __file__, f"lower_{name}"
    )
    return [n.target for n in found.graph.nodes if n.op == "call_function"]


def weight(x: Tensor, gradient: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    return gradient.exp(), gradient.t() @ x


def test_a_product_is_added_without_a_temporary() -> None:
    ops = compared(weight, "product")
    assert aten.addmm_.default in ops and aten.mm.default not in ops


def turned(x: Tensor, gradient: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    return gradient.exp(), (x.t() @ gradient).t()


def test_a_product_seen_through_a_transpose_is_added_to_the_transposed_sum() -> None:
    ops = compared(turned, "transposed_product")
    assert aten.addmm_.default in ops and aten.mm.default not in ops


def read_twice(x: Tensor, gradient: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    product = gradient.t() @ x
    return product.exp(), product


def test_a_product_that_something_else_reads_is_added_as_it_is() -> None:
    ops = compared(read_twice, "product_read_elsewhere")
    assert aten.add_.Tensor in ops and aten.addmm_.default not in ops


def no_product(x: Tensor, gradient: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    x.sin().sum()
    return gradient.exp(), gradient.sum() * x.narrow(0, 0, 4)


def test_another_gradient_is_added_where_it_is_made() -> None:
    """And what nobody reads goes."""
    ops = compared(no_product, "no_product")
    assert aten.add_.Tensor in ops and aten.sin.default not in ops


def test_factors_in_half_precision_are_cast_and_not_their_product() -> None:
    ops = compared(weight, "half_precision", torch.bfloat16)
    assert ops.count(aten._to_copy.default) == 2 and aten.addmm_.default in ops


# ---- one trace, several programs


def running(m: Small, ids: Tensor) -> Tensor:
    x, place = m.embed(ids), torch.arange(ids.shape[1])
    scores = x @ m.first(x).transpose(1, 2)
    weights = scores.masked_fill(place > place.unsqueeze(1), 0.0)
    return m.head(x + weights @ x)


@needs_symbols
def test_the_programs_that_are_made_of_a_joint_trace() -> None:
    """The forward writes rows of states and makes no gradients; the rebuild of states does nothing else."""
    facts = stages(Small(running), ids()).facts
    programs = SegmentPrograms(facts, facts.segments[1])
    made = {kind: lowered(programs, kind, FIRST) for kind in ("forward", "states", "joint")}
    texts = {kind: lowered_text(programs, program) for kind, program in made.items()}
    traced = traced_text(programs, "joint", FIRST)
    first = sections(source(running), ("traced: values and gradients", traced))
    check_golden(first, __file__, "lower_trace_of_a_chunk")
    check_golden(texts["joint"], __file__, "lower_trace_as_joint")
    rest = sections(("forward", texts["forward"]), ("states", texts["states"]))
    check_golden(rest, __file__, "lower_trace_as_forward_and_states")
    assert "grad_" in texts["joint"] and "grad_" not in rest
    ops = {kind: {n.target for n in p.module.graph.nodes} for kind, p in made.items()}
    assert aten.copy_.default in ops["states"] & ops["forward"] and aten.copy_.default not in ops["joint"]
    assert aten.bmm.default not in ops["states"]
