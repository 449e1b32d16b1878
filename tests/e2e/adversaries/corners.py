"""What a rule may forget: factors of zero, masks as numbers, sizes that divide by zero, unsigned ids."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from e2e_adversary import WHATEVER, Cases, Record, tokens
from e2e_subject import HUGE, NEVER, VOCAB, WIDTH, Subject, heads, joined, later
from torch import Tensor, nn

CASES = Cases("corners")


def thin() -> dict[str, nn.Module]:
    """An adapter of low rank, and a linear without a bias."""
    down, up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
    return {"down": down, "up": up, "base": nn.Linear(WIDTH, WIDTH, bias=False)}


@CASES.block(parts=thin)
def an_adapter_times_zero(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    q = heads(m.base(x) + m.up(m.down(x)) * 0.0)
    return x + joined(F.scaled_dot_product_attention(q, heads(m.lin2(x)), heads(m.v(x)), is_causal=True))


@CASES.block(parts=thin)
def an_adapter_times_two_and_zero(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + (m.base(x) - (m.up(m.down(x)) * 2) * 0.0)


@CASES.block(WHATEVER)
def a_mask_and_two(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    hides_nothing = (later(x) & 2).bool()
    return m.weighted(x, m.scores(x).masked_fill(hides_nothing, NEVER).softmax(-1))


@CASES.block(WHATEVER)
def a_mask_or_two_is_three(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return m.weighted(x, m.scores(x).masked_fill((later(x) | 2) == 3, NEVER).softmax(-1))


@CASES.block(WHATEVER)
def a_mask_xor_three(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return m.weighted(x, m.scores(x).masked_fill((later(x) ^ 3) == 2, NEVER).softmax(-1))


@CASES.block()
def a_mask_and_true(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return m.weighted(x, m.scores(x).masked_fill(later(x) & True, NEVER).softmax(-1))


@CASES.block(WHATEVER)
def samples_that_are_repeated(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + m.lin(x[:2].repeat(x.shape[0] // 2, 1, 1)) if x.shape[0] % 2 == 0 else x


@CASES.block(options={"check": "first"})
def padding_after_the_scores(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    scores = m.scores(x).masked_fill(later(x), HUGE)
    scores = scores + (1.0 - (ids > 1)[:, None, None, :].to(x.dtype)) * HUGE
    return m.weighted(x, scores.softmax(-1))


class Unsigned(Subject):
    """Documents come as unsigned integers of 16 bits."""

    def forward(self, input_ids: Tensor, documents: Tensor) -> Tensor:  # type: ignore[override]
        x = self.embed(input_ids)
        d = documents.long()
        hidden = later(x) | (d[:, None, :, None] != d[:, None, None, :])
        x = self.weighted(x, self.scores(x).masked_fill(hidden, HUGE).softmax(-1))
        return F.cross_entropy(self.head(x).view(-1, VOCAB), input_ids.view(-1))


@CASES.scenario(make=lambda door: Unsigned(), name="unsigned documents")
def _unsigned(m: Subject, call: object, record: Record) -> None:
    for length in (33, 21):
        documents = (torch.arange(length) // 9).expand(2, length).contiguous().to(torch.uint16)
        record.step(m, call, tokens(2, length), documents)  # type: ignore[arg-type]
