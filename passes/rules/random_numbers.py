"""Random numbers of the shape of a value: each row has its own, so a chunk draws those of its rows.

NOTE [random numbers by rows]: an op of these draws independent numbers, all of one distribution, which has
numbers for parameters. Which number a row gets is no property of the model: a streamed step draws others than
an eager one from the same seed, as with dropout, and each chunk draws the same again when it is recomputed.
Of the value that lends its shape nothing is read, and no gradient comes to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from ..graph.facts import Layout, NotSeparable, tensors_of
from ..graph.op_arguments import arguments
from .pointwise import align
from .registry import RuleContext, rule

aten = torch.ops.aten

#: The method of a tensor that draws the same, and its arguments: numbers, or names of arguments of the op.
DRAWS: dict[Any, tuple[str, tuple[str | float, ...]]] = {
    aten.rand_like.default: ("uniform_", (0.0, 1.0)),
    aten.randn_like.default: ("normal_", (0.0, 1.0)),
    aten.randint_like.default: ("random_", (0, "high")),
    aten.randint_like.low_dtype: ("random_", ("low", "high")),
    aten.uniform.default: ("uniform_", ("from", "to")),
    aten.normal_functional.default: ("normal_", ("mean", "std")),
    aten.exponential.default: ("exponential_", ("lambd",)),
    aten.cauchy.default: ("cauchy_", ("median", "sigma")),
    aten.log_normal.default: ("log_normal_", ("mean", "std")),
    aten.geometric.default: ("geometric_", ("p",)),
    aten.bernoulli.p: ("bernoulli_", ("p",)),
}
#: Ops that draw 0 or 1, and the argument that says how probable a 1 is, entry by entry.
PROBABILITIES: dict[Any, str] = {aten.bernoulli.default: "self", aten.bernoulli.Tensor: "p"}

#: How each of them is written in place.
IN_PLACE: dict[Any, Any] = {
    aten.uniform_.default: aten.uniform.default, aten.normal_.default: aten.normal_functional.default,
    aten.exponential_.default: aten.exponential.default, aten.cauchy_.default: aten.cauchy.default,
    aten.log_normal_.default: aten.log_normal.default, aten.geometric_.default: aten.geometric.default,
    aten.bernoulli_.float: aten.bernoulli.p, aten.bernoulli_.Tensor: aten.bernoulli.Tensor,
}  # fmt: skip


def how_drawn(op: Any, call: Mapping[str, Any]) -> tuple[str, tuple[float, ...]]:
    """The method of a tensor that draws what a call of an op of `DRAWS` draws, and its arguments.

    Args:
        call: arguments of the op by name.

    Raises:
        NotSeparable: they are not known when the graph is compiled.
    """
    method, given = DRAWS[op]
    found = tuple(call[g] if isinstance(g, str) else g for g in given)
    if not all(isinstance(g, (int, float)) for g in found):
        raise NotSeparable("numbers are drawn from a distribution that depends on the sizes of a call")
    return method, found  # type: ignore[return-value]


@rule(*DRAWS, *PROBABILITIES)
def drawn_by_rows(ctx: RuleContext, node: Node) -> Layout:
    """The rows of the value that lends its shape, or of the probabilities."""
    call = arguments(node)
    if call.get("generator") is not None:
        raise NotSeparable("numbers are drawn from a generator of the model's own")
    if node.target in DRAWS:
        how_drawn(node.target, call)
        return align(ctx, node, [call["self"]])
    lender, probable = call["self"], call[PROBABILITIES[node.target]]
    if [t.shape for t in tensors_of(lender)] != [t.shape for t in tensors_of(probable)]:
        raise NotSeparable("probabilities that are broadcast")
    if lender is not probable:
        ctx.ignores(lender)
    return align(ctx, node, [probable])
