"""Block masks that are inputs: their lengths as symbols.

A `BlockMask` holds the lengths that it was made for as two integers, to which `flex_attention` compares the
sequence. Dynamo takes them for constants, and so the sequence length for one as well. By the name of where it
found them it can be asked not to, through a list in PyTorch's settings, see NOTE [one more trace].
"""

from __future__ import annotations

import torch
import torch.compiler.config as settings
from torch.fx import GraphModule, Node

TABLES = (
    "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks", "q_indices",
    "full_q_num_blocks", "full_q_indices",
)  # fmt: skip
_added: list[str] = []


def table_sizes(module: GraphModule) -> dict[Node, set[int]]:
    """Inputs that are tables of a block mask, and their dims that follow the batch and the sequence.

    Args:
        module: a Dynamo graph.
    """
    found = {}
    for node in module.graph.find_nodes(op="placeholder"):
        value = node.meta.get("example_value")
        if _block_mask(node) is not None and isinstance(value, torch.Tensor):
            found[node] = {d for d, size in enumerate(value.shape) if d != 1 and size > 1}
    return found


def declare_lengths(module: GraphModule) -> bool:
    """Have Dynamo take the lengths of block masks for symbols in its next trace; False if it does already.

    Args:
        module: a Dynamo graph.
    """
    masks = dict.fromkeys(map(_block_mask, table_sizes(module)))
    names = [f"{mask}.seq_lengths[{k}]" for mask in masks for k in (0, 1)]
    listed = settings.dynamic_sources.split(",")
    new = [n for n in names if n not in listed]
    _list([*listed, *new])
    _added.extend(new)
    return bool(new)


def remove_lengths() -> None:
    """Leave PyTorch's settings as they were."""
    if _added:
        _list([n for n in settings.dynamic_sources.split(",") if n not in _added])
        _added.clear()


def _list(names: list[str]) -> None:
    listed = ",".join(n for n in names if n)
    if listed != settings.dynamic_sources:
        settings.dynamic_sources = listed


def _block_mask(node: Node) -> str | None:
    """Where Dynamo found the block mask of which an input is a table; None for other inputs."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    member, base = getattr(source, "member", None), getattr(source, "base", None)
    if member not in TABLES or base is None:
        return None
    name = base.name
    return name() if callable(name) else name
