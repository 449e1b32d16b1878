"""Recurrences: functions of transformers are streamed, and nobody's own function is taken for one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from e2e_adversary import STREAMED, WARNED, WHATEVER, Cases
from e2e_subject import WIDTH, Subject, heads, joined
from torch import Tensor, nn

try:
    from transformers.models.mamba.modeling_mamba import mamba_selective_scan
except ImportError:  # older versions have no function of their own for it
    mamba_selective_scan = None

CASES = Cases("recurrences")
STATES = 3


class Decay(nn.Module):
    """What a scan is given besides its input. Functions in its Python module, this one, are looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH + 2 * STATES)
        self.d = nn.Parameter(torch.rand(WIDTH))
        # transformers has it in float32, in which a gradient of it would be summed
        self.register_buffer("a", torch.rand(WIDTH, STATES))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        dt, b, c = self.out(x).transpose(1, 2).split([WIDTH, STATES, STATES], 1)
        return dt, -self.a.float().exp(), b, c, self.d


class Gates(nn.Module):
    """Decays and strengths of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, 2 * heads(torch.zeros(1, 1, WIDTH)).shape[1])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        g, beta = self.out(x).chunk(2, -1)
        return -F.softplus(g), beta.sigmoid()


def parts() -> dict[str, Any]:
    return {"decay": Decay(), "gates": Gates()}


def scanned(m: Subject, x: Tensor, **options: Any) -> Tensor:
    return mamba_selective_scan(x.transpose(1, 2), *m.decay(x), **options).transpose(1, 2)


@CASES.block(parts=parts)
def as_it_is(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + scanned(m, x)


@CASES.block(parts=parts)
def with_all_that_there_is(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    gate, bias = m.lin(x).transpose(1, 2), m.decay.d
    return x + scanned(m, m.norm(x), z=gate, delta_bias=bias, delta_softplus=True)


@CASES.block(parts=parts)
def two_in_a_row(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    for _ in range(2):
        x = m.norm(x + scanned(m, x, delta_softplus=True))
    return x


def convolved() -> dict[str, Any]:
    return {**parts(), "wide": nn.Conv1d(1, 1, 3), "apart": nn.Conv1d(WIDTH, WIDTH, 4, groups=WIDTH)}


@CASES.block(parts=convolved)
def after_a_convolution(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """Of each channel for itself: from chunk to chunk go the rows that it reads."""
    made = m.apart(F.pad(m.norm(x).transpose(1, 2), (3, 0))).transpose(1, 2)
    return x + scanned(m, F.silu(made), delta_softplus=True)


@CASES.block(parts=convolved)
def after_a_convolution_along_the_width(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """It does not go along the sequence, and the recurrence does."""
    made = m.wide(F.pad(x.reshape(-1, 1, WIDTH), (2, 0))).view(x.shape)
    return x + scanned(m, m.norm(made), delta_softplus=True)


@CASES.block(parts=parts)
def of_one_value(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """The input is the step size as well, and the gate."""
    _, a, b, c, d = m.decay(x)
    rows = x.transpose(1, 2)
    return x + mamba_selective_scan(rows, rows, a, b, c, d, z=rows, delta_softplus=True).transpose(1, 2)


@CASES.block(parts=parts)
def partly_without_a_gradient(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    dt, a, b, c, _ = m.decay(x)
    own = mamba_selective_scan(x.transpose(1, 2), dt.detach(), a, b, c.detach(), None, delta_softplus=True)
    return x + own.transpose(1, 2)


@CASES.block(parts=parts)
def steps_that_are_data(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    _, a, b, c, d = m.decay(x)
    dt = (ids % 3).to(x.dtype)[:, None].expand(-1, WIDTH, -1) / 4
    return x + mamba_selective_scan(x.transpose(1, 2), dt, a, b, c, d).transpose(1, 2)


@CASES.block(f"{STREAMED}|{WARNED}", parts)
def read_by_an_attention(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """What the recurrence makes are the keys of an attention."""
    made = heads(scanned(m, x, delta_softplus=True))
    q, v = heads(m.q(x)), heads(m.v(x))
    return x + joined(F.scaled_dot_product_attention(q, made, v, is_causal=True))


@CASES.block(f"{STREAMED}|{WARNED}", parts)
def read_without_a_view(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """It makes the columns of a product itself: channels are contracted, rows are read."""
    made = mamba_selective_scan(x.transpose(1, 2), *m.decay(x), delta_softplus=True)
    scores = (m.q(x) @ made) / 4
    hidden = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
    return x + scores.masked_fill(hidden, float("-inf")).softmax(-1) @ m.v(x)


@CASES.block(f"{STREAMED}|{WARNED}", parts)
def beside_all_rows(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """An attention without a mask, before it and after it."""
    x = x + scanned(m, x, delta_softplus=True)
    q, k, v = (heads(p(x)) for p in (m.q, m.k, m.v))
    return m.norm(x + scanned(m, x, delta_softplus=True)) + joined(F.scaled_dot_product_attention(q, k, v))


@CASES.block(WARNED, parts)
def backwards(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """Row i reads rows from i on."""
    return x + scanned(m, x.flip(1), delta_softplus=True).flip(1)


@CASES.block(WARNED, parts)
def over_channels(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """It goes along the entries of a row."""
    _, a, _, _, _ = m.decay(x)
    rows = a[:1].expand(x.shape[1], STATES) * torch.ones(x.shape[1], 1)
    b = x[:, :STATES]
    return x + mamba_selective_scan(x, x, rows, b, b, None, delta_softplus=True)


@CASES.block(WARNED, parts)
def with_its_last_state(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """A call that the op cannot say."""
    made, last = mamba_selective_scan(x.transpose(1, 2), *m.decay(x), return_last_state=True)
    return x + made.transpose(1, 2) + last.mean(-1)[:, None]


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


Change = Callable[[Tensor, Tensor, int, Tensor | None], tuple[Tensor, Tensor, Tensor | None]]


def that_only_looks_like_one(change: Change) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The delta rule with other values, decays or first state: of these, and of the size of a block."""

    def function(
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
        value, g, first = change(value, g, chunk_size, initial_state)
        made, last = _rule(query, key, value, g, beta, first)
        return made, last if output_final_state else None

    function.__name__ = change.__name__
    return function


@that_only_looks_like_one
def less_the_mean(value: Tensor, g: Tensor, size: int, first: Tensor | None) -> Any:
    """The mean of all rows is taken off."""
    return value - value.mean(1, keepdim=True), g, first


@that_only_looks_like_one
def of_blocks(value: Tensor, g: Tensor, size: int, first: Tensor | None) -> Any:
    """The mean of a block is taken off."""
    return torch.cat([b - b.mean(1, keepdim=True) for b in value.split(size, 1)], 1), g, first


@that_only_looks_like_one
def of_positions(value: Tensor, g: Tensor, size: int, first: Tensor | None) -> Any:
    """It decays with the position, counted from the first row that is given."""
    return value, g - torch.arange(value.shape[1], dtype=g.dtype)[:, None] / 8, first


@that_only_looks_like_one
def that_forgets(value: Tensor, g: Tensor, size: int, first: Tensor | None) -> Any:
    """What it begins with has no part in it."""
    return value, g, None


@that_only_looks_like_one
def without_a_way_back(value: Tensor, g: Tensor, size: int, first: Tensor | None) -> Any:
    """Right forwards; no gradient comes through the state that is handed over."""
    return value, g, None if first is None else first.detach()


def in_another_order(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    g: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Strengths come before decays, and the defaults are others."""
    return delta_rule(query, key, value, beta, g, chunk_size, initial_state, True, use_qk_l2norm_in_kernel)


def given(m: Subject, x: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values (B, T, H, D), decays and strengths (B, T, H)."""
    rows = (heads(p(x)).transpose(1, 2) for p in (m.q, m.k, m.v))
    return (*rows, *m.gates(x))


OWN = (delta_rule, less_the_mean, of_blocks, of_positions, that_forgets, without_a_way_back, in_another_order)
for _function in OWN:

    @CASES.block(WHATEVER, parts, name=_function.__name__.replace("_", " "))
    def _own(m: Subject, x: Tensor, ids: Tensor, function: Any = _function) -> Tensor:
        made, last = function(*given(m, x))
        return x + joined(made.transpose(1, 2)) + (0.0 if last is None else last.sum())


if mamba_selective_scan is None:
    CASES.all.clear()
