"""Gradients that are None where a branch was not taken: NOTE [branches on data] in `passes.graph.ops.branch`.

The step has run the bodies of all branches, so it has gradients, of zeros, for parameters that only such
bodies read. Whether eager has one is known at the end of the forward, from what the branches asked of all
rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ..passes.graph.facts import Facts

# Its hooks take it that there is no gradient.
SELF_CHECK = "streambp_fx.checking.short_steps"
HOOKED = "a parameter that only some branches on data give a gradient has a hook on it"


class Answers:
    """What the branches of one step asked, once it is known.

    Attributes:
        held: by number, tensors without dims, bool.
    """

    def __init__(self) -> None:
        self.held: Sequence[Tensor] = ()
        self._read: list[bool] | None = None

    def hold(self, ways: frozenset[frozenset[int]]) -> bool:
        """True if all predicates of one of these sets hold."""
        if self._read is None:  # one transfer for all of them
            self._read = torch.stack(list(self.held)).tolist()
        read = self._read
        return any(all(read[number] for number in way) for way in ways)


class _WhereAsked(torch.autograd.Function):
    """A value whose gradient is None unless some branches were taken."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, answers: Answers, ways: frozenset[frozenset[int]]) -> Tensor:
        """The value itself."""
        ctx.answers, ctx.ways = answers, ways
        ctx.set_materialize_grads(False)
        return value.view_as(value)

    @staticmethod
    @torch._disable_dynamo
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple:
        """The gradient, or None."""
        (gradient,) = gradients
        return gradient if gradient is not None and ctx.answers.hold(ctx.ways) else None, None, None


def has_hooks(value: Any) -> bool:
    """True for a tensor with hooks on its gradient: PyTorch calls them also if there is none."""
    if not isinstance(value, Tensor):
        return False
    own, after = value._backward_hooks or {}, getattr(value, "_post_accumulate_grad_hooks", None) or {}
    hooks = (*own.values(), *after.values(), *_hooks_of_its_node(value))
    return any(getattr(h, "__module__", None) != SELF_CHECK for h in hooks)


def _hooks_of_its_node(value: Tensor) -> Iterator[Callable[..., Any]]:
    """Hooks on the node that gives a tensor its gradient: the handle of a new hook knows the others."""
    node = torch.autograd.graph.get_gradient_edge(value).node if value.requires_grad else None
    for register in () if node is None else (node.register_hook, node.register_prehook):
        with register(_no_hook) as handle:
            yield from (h for h in (handle.hooks_dict_ref() or {}).values() if h is not _no_hook)


def _no_hook(*gradients: Any) -> None:
    """Does nothing."""


def is_hooked(facts: Facts, inputs: Sequence[Any]) -> bool:
    """True if an input of a graph that does not always have a gradient has hooks on it."""
    placeholders = [n for n in facts.nodes if n.op == "placeholder"] if facts.where_asked else []
    return any(n in facts.where_asked and has_hooks(v) for n, v in zip(placeholders, inputs, strict=False))


def where_asked(facts: Facts, values: Mapping[Node, Any]) -> tuple[dict[Node, Any], Answers]:
    """Values of a step of which those have a gradient that eager gives one, and what says it.

    Args:
        facts: of the graph.
        values: that the step begins with, by node.
    """
    answers, found = Answers(), dict(values)
    for node, ways in facts.where_asked.items():
        value = found.get(node)
        if isinstance(value, Tensor) and value.requires_grad and not has_hooks(value):
            found[node] = _WhereAsked.apply(value, answers, ways)
    return found, answers
