"""chunk and emit: the program of one chunk, on the chunk's rows and the columns that it reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from golden import check_golden
from golden_graphs import (
    FIRST,
    LATER,
    Small,
    ids,
    needs_symbols,
    sections,
    source,
    stages,
    traced,
    traced_text,
)
from torch import Tensor

from streambp_fx.passes.graph.facts import Role
from streambp_fx.passes.s4_trace.chunk_program import ChunkProgram
from streambp_fx.passes.s4_trace.program_inputs import Extent
from streambp_fx.passes.s5_lower.programs import SegmentPrograms

aten = torch.ops.aten
pytestmark = needs_symbols


def program(function: Callable[..., Any], name: str, extent: Extent = LATER, position: int = 1) -> list[Any]:
    """Compare the forward of a chunk with its golden file; the ops of it.

    Beside it stand the states, and what is evaluated on the chunk's columns.
    """
    found = stages(Small(function), ids())
    segment = found.facts.segments[position]
    assert segment.chunked, segment.reason
    programs = SegmentPrograms(found.facts, segment)
    chunk = ChunkProgram(found.facts, segment, segment.outputs, frozenset())
    title = "forward of a chunk" + ("" if extent.prefix else " without a prefix")
    text = sections(
        source(function),
        ("state", _state(chunk)),
        (title, traced_text(programs, "forward", extent)),
    )
    check_golden(text, __file__, f"chunk_{name}")
    nodes = traced(programs, "forward", extent).module.graph.nodes
    return [n.target for n in nodes if n.op == "call_function"]


def _state(chunk: ChunkProgram) -> str:
    columns = [n for n, role in chunk.needed if role is Role.COLUMN and n not in chunk.states]
    kept = [f"{s.node.name}, rows in dim {s.dim}" for s in chunk.states.values()]
    derived = [f"made of it for each chunk: {n.name}" for n in columns]
    return "\n".join([*kept, *derived]) or "none: rows read themselves alone"


def rows(m: Small, ids: Tensor) -> Tensor:
    place = torch.arange(ids.shape[1]).unsqueeze(1) * 0.5
    x = F.pad(m.embed(ids), (1, -1)).view(2, -1, 2, 4)
    x = (x.flatten(2) * place).expand(2, -1, 8)
    return F.linear(x, m.first.weight, m.bias).sum(-1)


def test_rows_that_read_themselves_alone() -> None:
    """Views get the sizes of the chunk, whole values are sliced, padding and biases are written out."""
    ops = program(rows, "rows", position=0)
    assert aten.addmm.default in ops and aten.linear.default not in ops
    assert aten.constant_pad_nd.default not in ops


def causal(m: Small, ids: Tensor) -> Tensor:
    x = m.embed(ids)
    q, k, v = m.heads(x), m.heads(m.first(x)), m.heads(m.second(x))
    return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def test_causal_attention_reads_the_prefix_and_then_the_own_rows() -> None:
    """Two blocks, merged by their log-sum-exp."""
    kernel = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert program(causal, "causal").count(kernel) == 2


def test_the_first_chunk_has_one_block() -> None:
    kernel = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert program(causal, "causal_first", FIRST).count(kernel) == 1


def windowed(m: Small, ids: Tensor) -> Tensor:
    x, place = m.embed(ids), torch.arange(ids.shape[1])
    distance = place.unsqueeze(1) - place
    mask = (distance >= 0) & (distance < 5)
    k = m.heads(m.first(x))
    return x + F.scaled_dot_product_attention(m.heads(x), k, k, mask).transpose(1, 2).flatten(2)


def test_a_mask_is_built_for_the_rows_and_columns_of_a_chunk() -> None:
    ops = program(windowed, "window")
    assert {aten.ge.Scalar, aten.lt.Scalar, aten.masked_fill.Scalar} <= set(ops)


def grouped(m: Small, ids: Tensor) -> Tensor:
    x, place = m.embed(ids), torch.arange(ids.shape[1])
    q, k = m.heads(x, 4), m.heads(m.first(x), 4)[:, :2].repeat_interleave(2, 1)
    scores = (q @ k.transpose(2, 3)).masked_fill(place > place.unsqueeze(1), float("-inf"))
    return x + (scores.softmax(-1) @ k).transpose(1, 2).flatten(2)


def test_repeated_heads_are_kept_once_and_read_as_groups() -> None:
    ops = program(grouped, "grouped_heads")
    assert aten.repeat_interleave.self_int not in ops and aten.index_select.default not in ops


def dropped(m: Small, ids: Tensor) -> Tensor:
    return F.dropout(m.first(m.embed(ids)), 0.1) * 2


def test_dropout_is_drawn_from_the_seed_of_the_chunk() -> None:
    ops = program(dropped, "dropout", position=0)
    assert torch.ops.streambp_fx.dropout_factors.default in ops


def loss(m: Small, ids: Tensor) -> Tensor:
    logits = m.head(m.embed(ids)).flatten(0, 1)
    return F.cross_entropy(logits, ids.flatten())


def test_rows_of_several_samples_in_one_dim() -> None:
    assert aten.nll_loss_forward.default in program(loss, "merged_rows")
