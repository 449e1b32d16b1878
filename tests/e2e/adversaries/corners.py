"""What a rule may forget: factors of zero, masks as numbers, sizes that divide by zero, unsigned ids, numbers
made of the length, operands without a say in the value.
"""

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


# ---- numbers made of the length, which a formula of a derivative takes for ordinary ones

OF_THE_LENGTH = {
    "a power": lambda m, x: m.lin(x).abs() ** (1 / x.shape[1]),
    "a power behind attention": lambda m, x: m.attend(x) ** (x.shape[1] // 10),
    "celu": lambda m, x: F.celu(m.lin(x), x.shape[1] / 30),
    "a norm": lambda m, x: m.lin(x).norm(p=1 + x.shape[1] / 10, dim=-1, keepdim=True) * x,
    "a correction": lambda m, x: m.lin(x).var(-1, correction=x.shape[1] % 5, keepdim=True) * x,
    "xlogy": lambda m, x: torch.xlogy(m.lin(x), x.shape[1]),
    "a weight's power": lambda m, x: F.linear(x, m.lin.weight.abs() ** (x.shape[1] / 30)),
    "float power": lambda m, x: torch.float_power(m.lin(x).abs() + 1, x.shape[1] / 20),
    "of batch and length": lambda m, x: m.lin(x).abs() ** (8 / (x.shape[0] * x.shape[1])),
}
for _name, _op in OF_THE_LENGTH.items():
    CASES.block(WHATEVER, name=f"{_name} of the length", options={"on_error": "eager"})(
        lambda m, x, ids, op=_op: x + op(m, x)
    )


@CASES.loss(WHATEVER, options={"on_error": "eager"})
def a_loss_to_the_power_of_the_length(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    each = F.cross_entropy(m.head(x).flatten(0, 1), ids.flatten(), reduction="none")
    return each.pow(1 + 1 / x.shape[1]).mean()


def two_powers(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return (m.lin(x).abs() + 0.5) ** (1 + (x.shape[1] // 128) * 0.5)


@CASES.scenario(WHATEVER, options={"on_error": "eager", "check": "first"}, block=two_powers)
def a_power_that_only_long_sequences_have(m: Subject, call: object, record: Record) -> None:
    """The self-check is of a short sequence."""
    for length in (33, 300, 150):
        record.step(m, call, tokens(2, length))  # type: ignore[arg-type]


# ---- operands without a say in the value: their gradients are zeros, and not None


def left_out() -> dict[str, nn.Module | nn.Parameter]:
    table, none, bare = (torch.ones(VOCAB, WIDTH), torch.zeros(0, WIDTH), torch.zeros(0))
    parameters = {k: nn.Parameter(v) for k, v in {"table": table, "none": none, "bare": bare}.items()}
    return {"lonely": nn.Linear(WIDTH, WIDTH), **parameters}


@CASES.block(parts=left_out)
def joined_with_no_features(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return torch.cat([m.lin(x), m.lonely(x)[..., :0]], -1)


@CASES.block(WHATEVER, parts=left_out)
def joined_with_no_rows(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return torch.cat([m.lonely(x)[:, :0], m.lin(x)], 1)


@CASES.block(parts=left_out)
def a_table_with_no_more_rows(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return m.lin(x) + torch.cat([m.table, m.none], 0)[ids] + torch.cat([m.lin.bias, m.bare])


@CASES.block(parts=left_out)
def copied_over(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    y = m.lonely(x)
    y.copy_(m.lin(x))
    return y


@CASES.block(parts=left_out)
def written_over(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    y = m.lonely(x)
    y[:, 0:] = m.lin(x)
    return y


@CASES.block(parts=left_out)
def written_over_by_a_row(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    y = m.lonely(x)
    y[:] = m.lin.bias
    return x + y


@CASES.block(parts=left_out)
def written_over_in_two_parts(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    y, new = m.lonely(x), m.lin(x)
    y[..., :5] = new[..., :5]
    y[..., 5:] = new[..., 5:]
    return y


@CASES.block(parts=left_out)
def written_into_memory_like_a_value(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """What is only as large as a value gives it no gradient: that of `lonely` is None."""
    y, new = torch.empty_like(m.lonely(x)), m.lin(x)
    y[..., :5] = new[..., :5]
    y[..., 5:] = new[..., 5:]
    return y


def of_the_last_row(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(m.head(x[:, -1]), ids[:, -1])


@CASES.scenario(make=lambda door: Subject(loss=of_the_last_row), options={"chunk": 1, "loss_chunk": 2})
def two_chunks_of_a_row(m: Subject, call: object, record: Record) -> None:
    """Both sizes of the last chunk's place are 1, which programs know as numbers."""
    for batch, length in ((2, 24), (4, 2)):
        record.step(m, call, tokens(batch, length))  # type: ignore[arg-type]
