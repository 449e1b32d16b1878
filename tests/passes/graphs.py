"""Small models for the unit tests of the passes, and their captured graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from streambp_fx.passes import analyze
from streambp_fx.passes.graph.facts import Facts

WIDTH = 8


class OneLayer(nn.Module):
    """embedding -> residual of a function of (module, hidden states) -> linear head, no loss."""

    def __init__(self, body: Callable[[OneLayer, Tensor], Tensor], vocabulary: int = 11) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.value, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary)
        self.body = body

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(x + self.out(self.body(self, x)))

    def heads(self, x: Tensor, count: int = 2) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value as (batch, heads, sequence, width of a head)."""
        split = (*x.shape[:2], count, -1)
        return tuple(p(x).view(split).transpose(1, 2) for p in (self.query, self.key, self.value))


def facts_of(
    module: nn.Module | Callable[..., Any],
    *inputs: Any,
    length_dims: tuple[int, ...] = (1,),
    logits: str = "keep",
) -> Facts:
    """Facts after all passes; dim `length_dims[k]` of input k carries the sequence."""
    run = functools.partial(analyze, logits=logits)
    return in_backend(run, module, *inputs, open_dims=length_dims)


def in_backend(
    function: Callable[[torch.fx.GraphModule, list[Any]], Any],
    module: nn.Module | Callable[..., Any],
    *inputs: Any,
    open_dims: tuple[int | tuple[int, ...], ...] = (1,),
) -> Any:
    """What a function makes of the graph and the inputs that Dynamo hands to a backend.

    Args:
        open_dims: of each input the dim, or the dims, whose size is a symbol; all other sizes are numbers.
    """
    found: list[Any] = []

    def backend(graph: torch.fx.GraphModule, examples: list[Any]) -> Any:
        found.append(function(graph, examples))
        return graph

    torch._dynamo.reset()
    for value, dims in zip(inputs, open_dims, strict=False):
        for dim in (dims,) if isinstance(dims, int) else dims:
            torch._dynamo.maybe_mark_dynamic(value, dim)
    torch.compile(module, backend=backend, fullgraph=True, dynamic=False)(*inputs)
    return found[0]


def one_layer(body: Callable[[OneLayer, Tensor], Tensor], length: int = 13, batch: int = 2) -> Facts:
    """Facts of a model of one layer at a sequence length."""
    torch.manual_seed(0)
    return facts_of(OneLayer(body), torch.randint(0, 11, (batch, length)))


def reasons(facts: Facts) -> list[str]:
    """Why segments are not chunked."""
    return [s.reason or "" for s in facts.segments if not s.chunked]
