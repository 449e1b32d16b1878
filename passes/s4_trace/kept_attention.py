"""Attentions whose output and log-sum-exp can be kept for the backward, and the bytes that they take."""

from __future__ import annotations

import torch
from torch.fx import Node

from ..graph.facts import Facts, Reach, Segment, tensors_of
from ..graph.op_arguments import sdpa_arguments
from .attention_kernels import choose
from .chunk_program import ChunkProgram

SDPA = torch.ops.aten.scaled_dot_product_attention.default


def attention_outputs(facts: Facts, segment: Segment) -> list[Node]:
    """Attentions of a segment whose output and log-sum-exp can stand in for computing them again.

    They are those whose backward is a kernel that takes both, over the state, in place.
    """
    if not segment.chunked or segment.reach is Reach.FULL:
        return []
    program = ChunkProgram(facts, segment, segment.outputs, frozenset())
    wanted = (m.node for m in segment.mixings if m.node.target is SDPA and m.node in facts.needs_grad)
    return [n for n in wanted if _by_kernel(program, n)]


def _by_kernel(program: ChunkProgram, node: Node) -> bool:
    call = sdpa_arguments(node)
    query, key, value = (tensors_of(call[k])[0] for k in ("query", "key", "value"))
    single = all(len(program.sources(call[k])) == 1 for k in ("key", "value"))
    alone = single and all(program.readers.get(program.sources(call[k])[0]) == 1 for k in ("key", "value"))
    # a program may be traced with the mask, and without where nothing but causality is left of it
    masks = [None] if call["attn_mask"] is None else [None, tensors_of(call["attn_mask"])[0]]
    taken = all(choose(query, key, value, mask) is not None for mask in masks)
    return alone and call["dropout_p"] == 0.0 and taken


def row_bytes_of_attention(node: Node) -> tuple[int, int]:
    """Bytes of an attention's output, and of its log-sum-exp, for one row of the batch."""
    value = tensors_of(node)[0]
    heads, size = int(value.shape[1]), int(value.shape[3])
    sums = torch.float64 if value.dtype == torch.float64 else torch.float32
    return heads * size * value.element_size(), heads * sums.itemsize
