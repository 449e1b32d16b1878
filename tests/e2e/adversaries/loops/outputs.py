"""Loops with several results, of which not all are read, returned or differentiated."""

from __future__ import annotations

from typing import Any

import torch
from e2e_adversary import STREAMED, WHATEVER, Record, tokens
from e2e_subject import WIDTH, Subject, token_loss
from torch import Tensor, nn
from torch.nn import functional as F

from .parts import CASES, block


class TwoStates(nn.Module):
    """A second state of the first one, which the rows that are returned do not read."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        h, c = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0])
        count, made, more = torch.zeros_like(seen[:, 0]), [], []
        for t in range(x.shape[1]):
            h = torch.tanh(self.a(x[:, t]) + 0.5 * h)
            c = torch.tanh(self.b(h) + 0.5 * c)
            count = 0.9 * count + seen[:, t]
            made.append(h)
            more.append(c * 2)
        return torch.stack(made, 1), torch.stack(more, 1), c, count


def two_states() -> dict[str, nn.Module]:
    return {"states": TwoStates()}


@block()
def a_result_that_nobody_reads(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h, made, more = torch.zeros_like(x[:, 0]), [], []
    for t in range(x.shape[1]):
        h = torch.tanh(m.lin(x[:, t]) + 0.5 * h)
        made.append(h)
        more.append(m.lin2(h))
    torch.stack(more, 1)
    return x + torch.stack(made, 1)


class WithStates(Subject):
    """What of the loop is returned, and what the loss is made of."""

    def __init__(self, returned: str) -> None:
        super().__init__(parts=two_states)
        self.returned = returned

    def forward(self, input_ids: Tensor) -> Any:  # type: ignore[override]
        x = self.attend(self.embed(input_ids))
        y, more, c, count = self.states(x, (input_ids > 2).to(x.dtype))
        if self.returned == "last":
            return self.head(x + y), c
        loss = token_loss(self, x + y, input_ids)
        if self.returned == "numbers":
            return (self.head(x) * more.mean()).square().mean(), loss
        return (loss, count) if self.returned == "count" else loss


def _first(model: Any, call: Any, record: Record, of: Any) -> None:
    for batch, length in ((2, 33), (3, 21)):
        model.zero_grad()
        ids = tokens(batch, length)
        found = call(ids)
        of(found, ids).backward()
        for value in torch.utils._pytree.tree_leaves(found):
            record("output", value)
            record("has a gradient", value.requires_grad)
        record.state(model)


def _case(returned: str, name: str, of: Any, want: str = STREAMED) -> None:
    for check in ("never", "first"):
        CASES.scenario(
            want,
            make=lambda door: WithStates(returned),
            name=name if check == "never" else f"{name}, checked",
            options={"check": check, "logits": "keep"},
        )(lambda model, call, record: _first(model, call, record, of))


_case("nothing", "a state that nobody reads", lambda loss, ids: loss)
_case(
    "last",
    "logits beside the last state",
    lambda found, ids: F.cross_entropy(found[0][:, :-1].flatten(0, 1), ids[:, 1:].flatten()),
    WHATEVER,
)
_case("numbers", "the second of two numbers", lambda found, ids: found[1], WHATEVER)
_case("count", "a count without a gradient", lambda found, ids: found[0], WHATEVER)
