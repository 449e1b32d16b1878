"""Inputs that the model changes in place (buffers). See NOTE [changes in place] in
`passes.graph.functionalization`.

NOTE [written once]: a streamed step reads a copy of such an input, in the forward and in the backward, and
writes the new value at the end of the forward, once. A backward that computes a layer again, or a step that
comes in between, then changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..passes.graph.facts import Facts


class WrittenInputs:
    """Those of a graph.

    Args:
        facts: of the graph, whose last results are the new values.
    """

    def __init__(self, facts: Facts) -> None:
        placeholders = [n for n in facts.nodes if n.op == "placeholder"]
        self.positions = [placeholders.index(n) for n in facts.written]

    def copied(self, inputs: Sequence[Any]) -> tuple:
        """The inputs, with copies of those that are written."""
        copies = {k: inputs[k].detach().clone() for k in self.positions}
        return tuple(copies.get(k, value) for k, value in enumerate(inputs))

    def write(self, inputs: Sequence[Any], results: list[Any]) -> list[Any]:
        """Write the new values into the inputs; the results that are the model's."""
        count = len(results) - len(self.positions)
        with torch.no_grad():
            for position, value in zip(self.positions, results[count:], strict=True):
                inputs[position].copy_(value)
        return results[:count]

    def overlap(self, inputs: Sequence[Any]) -> bool:
        """True if a written input shares memory with another, which its change would change as well."""
        if not self.positions:
            return False
        storages = [v.untyped_storage()._cdata for v in inputs if isinstance(v, Tensor)]
        return any(storages.count(inputs[k].untyped_storage()._cdata) > 1 for k in self.positions)
