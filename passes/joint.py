"""joint: a subgraph that runs whole as one graph of its forward and its VJP, to know what it costs."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from .extract import Subgraph
from .ir import Facts


def joint_program(facts: Facts, part: Subgraph, backward: bool = True) -> tuple[GraphModule, int]:
    """Forward and VJP of a subgraph as ATen ops, symbolic in the sizes that the graph was captured with.

    Args:
        facts: facts of the graph.
        part: the subgraph.
        backward: False for the forward alone.

    Returns:
        the graph, whose outputs are the values and then the gradients, and how many of them are values.
    """
    inputs = [n.meta["val"] for n in part.inputs]
    wanted = [k for k, n in enumerate(part.inputs) if n in facts.needs_grad]
    outputs = [k for k, n in enumerate(part.outputs) if n in facts.needs_grad]
    backward = backward and bool(wanted) and bool(outputs)

    def run(*flat: Any) -> list[Any]:
        given = list(flat[: len(inputs)])

        def values(*primals: Any) -> tuple[tuple[Any, ...], list[Any]]:
            for position, primal in zip(wanted, primals, strict=True):
                given[position] = primal
            found = list(part.module(*given))
            return tuple(found[k] for k in outputs), found

        if not backward:
            with torch.no_grad():
                return list(part.module(*given))
        _, pullback, found = torch.func.vjp(values, *(given[k] for k in wanted), has_aux=True)  # type: ignore[misc]
        with torch.no_grad():
            return [*found, *pullback(tuple(flat[len(inputs) :]))]

    tensor = next(v for v in (*inputs, *(n.meta["val"] for n in part.outputs)) if isinstance(v, torch.Tensor))
    mode = tensor.fake_mode  # type: ignore[attr-defined]
    cotangents = [part.outputs[k].meta["val"] for k in outputs] if backward else []
    with mode, torch.enable_grad():
        fresh = [_like(v) for v in (*inputs, *cotangents)]
        return make_fx(run, tracing_mode="real")(*fresh), len(part.outputs)


def _like(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
