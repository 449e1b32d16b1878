"""Branches of a model's Python code that ask the values of a tensor, traced with the body taken.

See NOTE [branches on data] in `passes.graph.ops.branch`. Dynamo cannot trace `if mask.any():`. Where it fails
within a function for that reason, the function's source is read: an `if` without `else`, or the rest of a
loop's body behind `if ...: continue`, whose body assigns variables or changes tensors in place, is put into a
function of its own. What that function is given and gives back are the values before and after. That it has
no other effect is seen by Dynamo's own record of effects, and by what the trace sees changed in place.
Functions themselves are not changed: Dynamo is given other code when it inlines one for this backend.

`rewriting` is the source, with loops over the entries that are `chosen`. `traced` is what stands in it,
`objects` what its variables may name, and `body` what is asked of the body. `inlining` gives it to Dynamo.
`as_asked` runs a graph of which nothing is proved.
"""

from __future__ import annotations

from .as_asked import as_asked
from .inlining import end_graphs_at_branches, watch_branches

__all__ = ["as_asked", "end_graphs_at_branches", "watch_branches"]
