"""What runs in the place of a graph that is not streamed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from .passes.graph.facts import Facts, Segment


@dataclasses.dataclass(frozen=True)
class Otherwise:
    """What runs in the place of a graph that is not streamed.

    Attributes:
        run: it, with the inputs of the graph.
        layers: how many layers it computes again one by one; 0: none. Then a graph is not streamed either in
            which more than one of them would be computed again at once.
    """

    run: Callable[..., Any]
    layers: int = 0

    def is_better(self, facts: Facts) -> Segment | None:
        """A segment that runs whole and is much longer than a layer, if there is one.

        NOTE [longer than a layer]: in it nothing is known of where the rows are, so it is cut nowhere.
        """
        whole = [s for s in facts.segments if not s.chunked]
        longest = max(whole, key=lambda s: len(s.nodes), default=None)
        ops = sum(len(s.nodes) for s in facts.segments)
        return longest if longest is not None and 2 * self.layers * len(longest.nodes) > 3 * ops else None


@dataclasses.dataclass
class Unstreamed:
    """What runs in the place of a graph that is not streamed, for all sizes."""

    run: Callable[..., Any]

    def accepts(self, inputs: Sequence[Any]) -> bool:
        """True: the graph runs with any sizes."""
        return True

    def __call__(self, *inputs: Any) -> Any:
        return self.run(*inputs)
