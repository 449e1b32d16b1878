"""What a short step multiplies with where it drops: are these the factors of a dropout?

NOTE [factors of dropout]: with any factors the gradient is that of the loss, see NOTE [dropout in a
self-check]. So they are looked at as they are drawn: the probability is one of the graph's, each factor is 0
or 1 / (1 - p), as many are 0 as chance allows, and no two draws of a forward are of one seed, or are the same
by another.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from types import BuiltinFunctionType

from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node

from ..passes.graph.op_arguments import arguments
from ..passes.graph.purity import is_random
from .rounding import RTOL

# By so many standard deviations the share of zeros may differ from what is expected.
DEVIATIONS = 7.0
# Entries of a draw, and zeros or others among them as expected, from which two are hardly ever the same.
MANY = 64


def may_draw(node: Node) -> bool:
    """True for a random op, and for whatever is no plain op: a function of the user's, a region.

    Python's own functions (of sizes, and of the results of an op) draw nothing.
    """
    if node.op != "call_function" or isinstance(node.target, BuiltinFunctionType):
        return False
    return is_random(node) or not isinstance(node.target, OpOverload)


@dataclass(frozen=True)
class Draw:
    """One draw of factors.

    Attributes:
        probability: with which one is 0.
        seed: of the draw.
        shape: of the tensor.
        zeros: how many there are.
        off: by which share of it another factor is not 1 / (1 - p); 0.0 where rounding may make that.
        content: a hash of where the zeros are.
    """

    probability: float
    seed: int
    shape: tuple[int, ...]
    zeros: int
    off: float
    content: int

    @property
    def entries(self) -> int:
        """How many factors there are."""
        return math.prod(self.shape)


def draw_of(factors: Tensor, probability: float, seed: int) -> Draw:
    """What is kept of factors, of any shape and dtype."""
    kept = factors != 0
    others = factors[kept].double() * (1 - probability) - 1
    off = float(others.abs().max()) if others.numel() else 0.0
    places = kept.flatten().nonzero().flatten().cpu()
    content = hash(tuple(places.tolist()))
    zeros = factors.numel() - len(places)
    tolerance = RTOL.get(factors.dtype, 0.0)
    return Draw(probability, seed, tuple(factors.shape), zeros, off if off > tolerance else 0.0, content)


def wrong_draws(draws: Collection[Draw], probabilities: Collection[float], most: int = 1) -> Iterator[str]:
    """What is wrong with the draws of a forward, in words.

    Args:
        draws: of one forward.
        probabilities: of the graph; empty if they are not known.
        most: how often the forward may run one op on one chunk.
    """
    by_probability: dict[float, list[Draw]] = defaultdict(list)
    for draw in draws:
        by_probability[draw.probability].append(draw)
    for p, own in by_probability.items():
        if probabilities and not any(math.isclose(p, known) for known in probabilities):
            yield f"it drops with a probability of {p}, of which there is none in the graph"
        if any(d.off for d in own):
            yield "what is not dropped is not divided by the probability of that"
        entries, zeros = sum(d.entries for d in own), sum(d.zeros for d in own)
        if abs(zeros - entries * p) > DEVIATIONS * math.sqrt(entries * p * (1 - p)) + 0.5:
            yield f"{zeros} of {entries} entries are dropped, with a probability of {p}"
        many = [d for d in own if d.entries * min(p, 1 - p) >= MANY]
        if any(n > most for n in Counter((d.seed, d.shape) for d in many).values()):
            yield "two draws of one forward have one seed"
        distinct = {(d.seed, d.content, d.shape) for d in many}
        if any(n > 1 for n in Counter((content, shape) for _, content, shape in distinct).values()):
            yield "two draws with other seeds are the same"


def probabilities_of(nodes: Collection[Node]) -> set[float]:
    """Those of the dropouts of a graph; empty if some are no numbers, or may be in a function or a region."""
    if any(may_draw(n) and not isinstance(n.target, OpOverload) for n in nodes):
        return set()
    calls = [arguments(n) for n in nodes if isinstance(n.target, OpOverload)]
    found = [call[name] for call in calls for name in ("p", "dropout_p") if name in call]
    return {float(p) for p in found} if all(isinstance(p, int | float) for p in found) else set()
