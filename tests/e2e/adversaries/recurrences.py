"""Functions with the interface of a gated delta rule: some have a state, and some only look so."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from e2e_adversary import STREAMED, WARNED, WHATEVER, Cases
from e2e_subject import WIDTH, Subject, heads, joined
from torch import Tensor, nn

CASES = Cases("recurrences")


class Decay(nn.Module):
    """Gates of the heads. Its Python module is this one, so the functions below are looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, 2 * heads(torch.zeros(1, 1, WIDTH)).shape[1])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        g, beta = self.out(x).chunk(2, -1)
        return -F.softplus(g), beta.sigmoid()


def parts() -> dict[str, Any]:
    return {"gates": Decay()}


def _rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Row by row: the state decays, forgets what the key reads of it, and takes the value instead."""
    if state is None:
        state = value.new_zeros(value.shape[0], value.shape[2], key.shape[3], value.shape[3])
    made = []
    for k in range(query.shape[1]):
        state = state * g[:, k, :, None, None].exp()
        new = (value[:, k] - (state * key[:, k, :, :, None]).sum(-2)) * beta[:, k, :, None]
        state = state + key[:, k, :, :, None] * new[..., None, :]
        made.append((state * query[:, k, :, :, None]).sum(-2))
    return torch.stack(made, 1), state


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor | None]:
    if use_qk_l2norm_in_kernel:
        query, key = F.normalize(query, dim=-1), F.normalize(key, dim=-1)
    made, last = _rule(query, key, value, g, beta, initial_state)
    return made, last if output_final_state else None


def less_the_mean(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The mean of all rows is taken off."""
    made, last = _rule(query, key, value - value.mean(1, keepdim=True), g, beta, initial_state)
    return made, last if output_final_state else None


def of_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The mean of a block is taken off."""
    blocks = [b - b.mean(1, keepdim=True) for b in value.split(chunk_size, 1)]
    made, last = _rule(query, key, torch.cat(blocks, 1), g, beta, initial_state)
    return made, last if output_final_state else None


def of_positions(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """It decays with the position, counted from the first row that is given."""
    places = torch.arange(query.shape[1], dtype=g.dtype)[:, None]
    made, last = _rule(query, key, value, g - places / 8, beta, initial_state)
    return made, last if output_final_state else None


def that_forgets(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """What it begins with has no part in it."""
    made, last = _rule(query, key, value, g, beta, None)
    return made, last if output_final_state else None


def without_a_way_back(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Right forwards; no gradient comes through the state that is handed over."""
    first = None if initial_state is None else initial_state.detach()
    made, last = _rule(query, key, value, g, beta, first)
    return made, last if output_final_state else None


def given(m: Subject, x: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values (B, T, H, D), decays and strengths (B, T, H)."""
    rows = (heads(p(x)).transpose(1, 2) for p in (m.q, m.k, m.v))
    return (*rows, *m.gates(x))


def back(rows: Tensor) -> Tensor:
    return joined(rows.transpose(1, 2))


@CASES.block(parts=parts)
def with_a_state(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + back(delta_rule(*given(m, x))[0])


@CASES.block(parts=parts)
def normalised(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + back(delta_rule(*given(m, x), use_qk_l2norm_in_kernel=True)[0])


@CASES.block(parts=parts)
def two_in_a_row(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    for _ in range(2):
        x = x + back(delta_rule(*given(m, m.norm(x)))[0])
    return x


@CASES.block(parts=parts)
def of_one_value(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """Queries, keys and values are the same tensor."""
    q, _, _, g, beta = given(m, x)
    return x + back(delta_rule(q, q, q, g, beta)[0])


@CASES.block(parts=parts)
def decays_without_a_gradient(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    q, k, v, g, beta = given(m, x)
    return x + back(delta_rule(q, k.detach(), v, g.detach(), beta)[0])


@CASES.block(parts=parts)
def decays_that_are_data(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    q, k, v, g, beta = given(m, x)
    own = -(ids % 3).to(x.dtype)[..., None].expand_as(g) / 4
    return x + back(delta_rule(q, k, v, own, beta)[0])


@CASES.block(f"{STREAMED}|{WARNED}", parts)
def read_by_an_attention(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """What the recurrence makes are the keys of an attention, as it is and through a view."""
    made = delta_rule(*given(m, x))[0].transpose(1, 2)
    q, v = heads(m.q(x)), heads(m.v(x))
    return x + joined(F.scaled_dot_product_attention(q, made, v, is_causal=True))


@CASES.block(f"{STREAMED}|{WARNED}", parts)
def read_as_it_is(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """Samples and rows of the recurrence stand where an attention has heads and rows."""
    made = delta_rule(*given(m, x))[0].flatten(2)
    scores = (m.q(x) @ made.transpose(1, 2)) / 4
    hidden = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
    return x + scores.masked_fill(hidden, float("-inf")).softmax(-1) @ m.v(x)


@CASES.block(f"{STREAMED}|{WARNED}", parts)
def beside_all_rows(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """An attention without a mask reads what the recurrence has made of all rows."""
    x = x + back(delta_rule(*given(m, x))[0])
    q, k, v = (heads(p(x)) for p in (m.q, m.k, m.v))
    return x + back(delta_rule(*given(m, x))[0]) + joined(F.scaled_dot_product_attention(q, k, v))


@CASES.block(WARNED, parts)
def backwards(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """Row i reads rows from i on."""
    turned = delta_rule(*(v.flip(1) for v in given(m, x)))[0]
    return x + back(turned.flip(1))


@CASES.block(WARNED, parts)
def over_samples(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """It goes along the samples."""
    return x + back(delta_rule(*(v.transpose(0, 1) for v in given(m, x)))[0].transpose(0, 1))


@CASES.block(WARNED, parts)
def that_ends_in_another(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """The last state of one is what another begins with: not a call that the op can say."""
    _, last = delta_rule(*given(m, x), output_final_state=True)
    return x + back(delta_rule(*given(m, x), initial_state=last)[0])


FALSE = (less_the_mean, of_blocks, of_positions, that_forgets, without_a_way_back)
for _function in FALSE:

    @CASES.block(WHATEVER, parts, name=_function.__name__.replace("_", " "))
    def _false(m: Subject, x: Tensor, ids: Tensor, function: Any = _function) -> Tensor:
        return x + back(function(*given(m, x), chunk_size=8)[0])
