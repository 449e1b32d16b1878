"""What the example values of a Dynamo graph say of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule


def is_on_cpu(examples: Sequence[Any]) -> bool:
    """True if all tensors among inputs of a graph, of any shape and dtype, are on the CPU."""
    return all(v.device.type == "cpu" for v in examples if isinstance(v, torch.Tensor))


def differentiates(module: GraphModule) -> bool:
    """True if some output of a graph has a gradient."""
    output = next(n for n in module.graph.nodes if n.op == "output")
    values = (n.meta.get("example_value") for n in output.all_input_nodes)
    leaves = torch.utils._pytree.tree_leaves(list(values))
    return any(isinstance(v, torch.Tensor) and v.requires_grad for v in leaves)
