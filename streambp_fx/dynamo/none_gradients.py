"""Custom autograd functions whose backward is given None where an output has no gradient.

NOTE [gradients that are not made]: `ctx.set_materialize_grads(False)` has a backward see None, and not zeros,
for an output that nobody has differentiated. Dynamo traces the backward with a gradient for each output
(PyTorch 2.13: every backend of `torch.compile` then gives another gradient than eager, without a word). A
function of one output has its gradient whenever its backward runs; one of several is not captured.
"""

from __future__ import annotations

import functools
from typing import Any

from torch._dynamo.exc import Unsupported
from torch._dynamo.variables import higher_order_ops

from .this_backend import MARK, is_ours

WHY = (
    "a custom autograd function of several outputs calls ctx.set_materialize_grads(False), and Dynamo has "
    "its backward see zeros in the place of None"
)


def refuse_none_gradients() -> None:
    """From now on such functions are not captured, in what is traced for this backend."""
    variable = getattr(higher_order_ops, "AutogradFunctionApplyVariable", None)
    own = getattr(variable, "trace_forward_graph", None)
    if own is None or getattr(own, MARK, False):
        return

    @functools.wraps(own)
    def traced(self: Any, tx: Any, ctx: Any, *args: Any, **kwargs: Any) -> Any:
        found = own(self, tx, ctx, *args, **kwargs)
        changed = tx.output.side_effects.store_attr_mutations.get(ctx, {})
        several = len(getattr(found[1], "items", ())) > 1
        if several and "materialize_grads" in changed and is_ours(tx.output.compiler_fn):
            raise Unsupported(WHY)
        return found

    setattr(traced, MARK, True)
    variable.trace_forward_graph = traced  # type: ignore[union-attr]
