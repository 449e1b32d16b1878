"""Complex values: rotary embeddings, heads, parameters, in-place changes through real views."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from e2e_adversary import REFUSED, WHATEVER, Cases, Record, tokens
from e2e_subject import WIDTH, Subject, heads, joined, token_loss
from torch import Tensor, nn

CASES = Cases("complex")


def paired(x: Tensor) -> Tensor:
    """(..., n) as (..., n / 2) complex numbers."""
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())


def unpaired(z: Tensor) -> Tensor:
    return torch.view_as_real(z).flatten(-2)


def turns(x: Tensor, count: int) -> Tensor:
    """(T, count) of absolute value one."""
    frequencies = 1.0 / 10 ** torch.arange(count, dtype=x.dtype)
    angle = torch.outer(torch.arange(x.shape[1], dtype=x.dtype), frequencies)
    return torch.polar(torch.ones_like(angle), angle)


@CASES.block()
def rotary(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    q, k, v = heads(m.lin(x)), heads(m.lin2(x)), heads(m.v(x))
    t = turns(x, 2)
    q, k = unpaired(paired(q) * t), unpaired(paired(k) * t)
    return x + joined(F.scaled_dot_product_attention(q, k, v, is_causal=True))


@CASES.block()
def rotary_of_queries_alone(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    q = unpaired(paired(heads(m.lin(x))) * turns(x, 2))
    return x + joined(F.scaled_dot_product_attention(q, heads(m.lin2(x)), heads(x), is_causal=True))


@CASES.block(
    parts=lambda: {"rotation": torch.polar(torch.ones(64, 6).double(), torch.rand(64, 6).double())},
)
def rotary_by_a_buffer(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    z = paired(m.lin(x)) * m.rotation[: x.shape[1]]
    return x + unpaired(z)


@CASES.block()
def polar_of_values(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    z = torch.polar(m.lin(x).exp(), m.lin2(x))
    return x + z.real + z.imag * m.scale


@CASES.block()
def complex_of_two(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    z = torch.complex(m.lin(x), m.lin2(x))
    return x + (z * z.conj()).real + z.abs() + z.angle()


@CASES.block()
def exp_of_imaginary(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    z = (1j * m.lin(x)).exp() * m.lin2(x)
    return x + z.real - z.imag


@CASES.block()
def complex_scores(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    q, k = paired(heads(m.lin(x))), paired(heads(m.lin2(x)))
    scores = (q @ k.conj().transpose(-1, -2)).real
    hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    return x + joined(scores.masked_fill(hidden, float("-inf")).softmax(-1) @ heads(m.v(x)))


@CASES.block()
def complex_linear(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    weight = torch.complex(m.lin.weight, m.lin2.weight)
    z = x.to(torch.complex128) @ weight
    return x + z.real * z.imag


@CASES.block(WHATEVER)
def complex_cumsum(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """A linear recurrence in the complex plane, as in LRU and S4D."""
    z = paired(m.lin(x)) * turns(x, 6)
    state = z.cumsum(1) * turns(x, 6).conj()
    return x + unpaired(state) / 30


@CASES.block(want=WHATEVER)
def fft_along_channels(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    z = torch.fft.rfft(m.lin(x), dim=-1)
    return x + torch.fft.irfft(z * z, n=WIDTH, dim=-1) / WIDTH


@CASES.block(want=WHATEVER)
def fft_along_rows(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """A long convolution: causal only because it is padded, which nobody proves."""
    n = 2 * x.shape[1]
    kernel = (-torch.arange(x.shape[1], dtype=x.dtype) * 0.3).exp()
    z = torch.fft.rfft(m.lin(x), n=n, dim=1) * torch.fft.rfft(kernel, n=n)[:, None]
    return x + torch.fft.irfft(z, n=n, dim=1)[:, : x.shape[1]]


@CASES.block(want=WHATEVER)
def fft_mixing(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + torch.fft.fft(torch.fft.fft(m.lin(x), dim=-1), dim=1).real / 50


@CASES.block()
def imaginary_part_changed_in_place(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    z = paired(m.lin(x))
    z.imag.mul_(0.5)
    z.real.add_(1)
    return x + unpaired(z)


@CASES.block()
def real_view_of_a_changed_complex(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = m.lin(x)
    z = torch.view_as_complex(h.view(*h.shape[:-1], -1, 2))
    z *= 1j
    z += 0.5
    return x + h


@CASES.block(WHATEVER)
def conj_of_a_view(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    z = paired(m.lin(x))
    other = z.conj()
    z = z * 2
    return x + unpaired((other * z.mH.mT).resolve_conj())


@CASES.block(parts=lambda: {"spectrum": nn.Parameter(torch.randn(6, dtype=torch.complex128))})
def complex_parameter(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + unpaired(paired(m.lin(x)) * m.spectrum)


@CASES.block(parts=lambda: {"spectrum": nn.Parameter(torch.randn(6, 2))})
def parameter_as_complex(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + unpaired(paired(m.lin(x)) * torch.view_as_complex(m.spectrum))


@CASES.block()
def complex_residual(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    z = x + 1j * m.lin(x)
    z = z + 0.5j * z.conj()
    z = z / (1 + z.abs())
    return z.real + z.imag


@CASES.block()
def real_times_complex(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    z = m.scale * turns(x, WIDTH) * m.lin(x)
    return x + torch.where(z.real > 0, z, z.conj()).imag


# ---- losses of complex values


@CASES.loss()
def head_on_view_as_real(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    z = paired(x) * turns(x, 6)
    return token_loss(m, torch.view_as_real(z).flatten(2), ids)


@CASES.loss()
def power_of_complex_logits(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    logits = torch.complex(m.head(x), m.head(x.flip(-1))).abs()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@CASES.loss()
def real_of_a_complex_sum(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return token_loss(m, x, ids) + ((paired(x) * turns(x, 6)).sum() * (0.3 + 0.1j)).real / 40


@CASES.loss(want=WHATEVER)
def complex_output(m: Subject, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    return token_loss(m, x, ids), paired(x) * turns(x, 6)


@CASES.loss(want=WHATEVER)
def complex_output_alone(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return paired(x) * turns(x, 6)


@CASES.loss(want=WHATEVER)
def complex_scalar_output(m: Subject, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    return token_loss(m, x, ids), paired(x).mean()


@CASES.loss(want=WHATEVER)
def complex_rows_output(m: Subject, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    return token_loss(m, x, ids), paired(x).prod(-1)


class ViewBeside(Subject):
    """Returns a view of a complex value that the loss is made of."""

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x = self.attend(self.embed(input_ids))
        z = paired(x)
        return token_loss(self, unpaired(z * z), input_ids), z.view(z.shape)


@CASES.scenario(f"{WHATEVER}|{REFUSED}", make=lambda door: ViewBeside(), name="a view beside the loss")
def _view_beside(m: Subject, call: Any, record: Record) -> None:
    for length in (33, 21):
        loss, view = call(tokens(2, length))
        (found,) = torch.autograd.grad(loss, view, allow_unused=True)
        record("loss", loss)
        record("of the view", None if found is None else torch.view_as_real(found))
