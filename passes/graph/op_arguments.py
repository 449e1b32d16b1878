"""The arguments of an op by name, however they were passed."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from torch.fx import Node


def arguments(node: Node) -> dict[str, Any]:
    """The arguments of an op by name, as its schema binds them, defaults among them."""
    return bound(node.target, node.args, node.kwargs)


def bound(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of an op by name."""
    names, defaults = _signature(op)
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


@functools.cache
def _signature(op: Any) -> tuple[list[str], dict[str, Any]]:
    given = op._schema.arguments
    return [a.name for a in given], {a.name: a.default_value for a in given if a.has_default_value()}


def sdpa_arguments(node: Node) -> dict[str, Any]:
    """Arguments of `scaled_dot_product_attention` by name."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    result: dict[str, Any] = {
        "attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False,
    }  # fmt: skip
    result.update(zip(names, node.args, strict=False))
    result.update(node.kwargs)
    return result
