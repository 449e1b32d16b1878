"""Autograd functions of a model: streamed if forward and backward keep rows apart, exact always."""

from __future__ import annotations

import copy
import functools
import re
from typing import Any, ClassVar

import pytest
import torch
from custom_functions import Clipped, Function, StraightThrough
from e2e_check import assert_all_chunked, assert_close_grads, check_exact, grads, transform
from e2e_models import HIDDEN, build, padded, plain, sample
from torch import Tensor, nn
from torch.nn import functional as F

import streambp_fx


class Normalised(Function):
    """A norm of each row, from what it has kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        scale = x.square().mean(-1, keepdim=True).add(1e-6).rsqrt()
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, scale = ctx.saved_tensors
        return scale * gradient - x * scale**3 * (x * gradient).mean(-1, keepdim=True)


class Heads(Function):
    """Rows apart, but Dynamo hands the sizes to the function as numbers: those of all rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        heads = x.view(x.shape[0], x.shape[1], 4, -1)
        return (heads - heads.mean(-1, keepdim=True)).reshape(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        heads = gradient.view(gradient.shape[0], gradient.shape[1], 4, -1)
        return (heads - heads.mean(-1, keepdim=True)).reshape(gradient.shape)


class LooksAhead(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + 0.5 * x.flip(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient + 0.5 * gradient.flip(1)


class GradientOfAllRows(Function):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient - gradient.mean(1, keepdim=True)


class GradientOfRowsBefore(Function):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.cumsum(1) / 20


class GradientOfLengthOne(Function):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / (1 + gradient.norm())


class CountsRows(Function):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (gradient.shape[1] / 50)


class CountsEntries(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * (x.numel() / 5000)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (gradient.numel() / 5000)


class NumbersRows(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * torch.arange(x.shape[1], dtype=x.dtype).unsqueeze(-1) / 30

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * torch.arange(gradient.shape[1], dtype=gradient.dtype).unsqueeze(-1) / 30


class GradientUpsideDown(Function):
    """Batch and rows change places in the gradient where they can: no rule may go by sizes."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.transpose(0, 1).reshape(gradient.shape) * 2


class After(nn.Module):
    """What an MLP makes goes through a function."""

    def __init__(self, inner: nn.Module, function: Any) -> None:
        super().__init__()
        self.inner, self.function = inner, function

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(self.inner(x))


def with_function(function: Any, layer: int = 1) -> Any:
    model = build("llama")
    model.model.layers[layer].mlp = After(model.model.layers[layer].mlp, function)
    return model


BATCHES = {
    "T=67": plain(2, 67), "T=32": plain(2, HIDDEN), "right": padded(65, "right"),
}  # fmt: skip
ROWS_APART = {f.__name__: f for f in (StraightThrough, Clipped, Normalised)}
ROWS_TOGETHER: dict[str, tuple[Any, str]] = {
    "LooksAhead": (LooksAhead, "flip"),
    "GradientOfAllRows": (GradientOfAllRows, "reduction over the sequence"),
    "GradientOfRowsBefore": (GradientOfRowsBefore, "a scan along the sequence"),
    "GradientOfLengthOne": (GradientOfLengthOne, "reduc|norm"),
    "CountsRows": (CountsRows, "number of rows"),
    "CountsEntries": (CountsEntries, "number of rows"),
    "NumbersRows": (NumbersRows, "rows"),
    "GradientUpsideDown": (GradientUpsideDown, "rows"),
    "Heads": (Heads, "given the number of rows"),
}


@pytest.mark.parametrize("name", sample(ROWS_APART))
def test_rows_apart_are_streamed(name: str) -> None:
    _, streamed = check_exact(functools.partial(with_function, ROWS_APART[name]), BATCHES)
    assert_all_chunked(streamed)


@pytest.mark.parametrize("name", sample(ROWS_TOGETHER))
def test_rows_together_are_not(name: str) -> None:
    function, reason = ROWS_TOGETHER[name]
    with pytest.warns(streambp_fx.StreamBPWarning):
        _, streamed = check_exact(functools.partial(with_function, function), BATCHES, unchunked=None)
    assert_refused(streamed, reason)


def assert_refused(streamed: Any, reason: str) -> None:
    schedule = streambp_fx.schedule(streamed)
    assert schedule is not None
    whole = [s.reason for s in schedule.segments if not s.chunked]
    assert any(re.search(reason, why) for why in whole), whole


# -- weights ---------------------------------------------------------------------------------------------


class Quantised(torch.autograd.Function):
    """Rows times a frozen matrix of 8-bit numbers, which is decoded for either direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(codes, scale)
        return F.linear(x, codes.to(x.dtype) * scale, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        codes, scale = ctx.saved_tensors
        return gradient @ (codes.to(gradient.dtype) * scale), None, None, None


class Trained(torch.autograd.Function):
    """A linear layer whose author sums the gradient of its weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.flatten(0, 1).t() @ x.flatten(0, 1)


class QuantisedLinear(nn.Module):
    codes: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("codes", (weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return Quantised.apply(x, self.codes, self.scale, None)


class TrainedLinear(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight

    def forward(self, x: Tensor) -> Tensor:
        return Trained.apply(x, self.weight)


PLACES = (("self_attn", "q_proj"), ("self_attn", "v_proj"), ("mlp", "down_proj"))


def with_linears(kind: Any, places: Any = PLACES) -> Any:
    model = build("llama")
    for layer in model.model.layers:
        for parent, name in places:
            module = getattr(layer, parent)
            setattr(module, name, kind(getattr(module, name)))
    return model


@pytest.mark.slow
def test_frozen_weights_are_streamed() -> None:
    batches = {**BATCHES, "left": padded(41, "left")}
    _, streamed = check_exact(functools.partial(with_linears, QuantisedLinear), batches)
    assert_all_chunked(streamed)


def test_a_gradient_for_a_weight_is_not() -> None:
    """The sum over all rows is the author's: nothing says that sums over chunks add up to it."""
    factory = functools.partial(with_linears, TrainedLinear, PLACES[-1:])
    with pytest.warns(streambp_fx.StreamBPWarning):
        _, streamed = check_exact(factory, {"T=67": plain(2, 67)}, unchunked=None)
    assert_refused(streamed, "gradient of a weight")


# -- backwards that are not linear -----------------------------------------------------------------------


class Regularised(Function):
    """Adds the gradient of a penalty: there is one where the loss gives none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient + 0.3 * ctx.saved_tensors[0]


class Saturated(Regularised):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.tanh() * ctx.saved_tensors[0]


class Constant(Regularised):
    """What comes does not count."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return ctx.saved_tensors[0] * 0.1


NOT_LINEAR = {f.__name__: f for f in (Regularised, Saturated, Constant)}


class Penalised(nn.Module):
    """A causal LM with a function in its layers, on its keys and values or on its logits.

    Args:
        place: "layers", "states", "logits", or "beside": of values that are returned beside the loss.
    """

    def __init__(self, function: Any, place: str) -> None:
        super().__init__()
        self.function, self.place = function, place
        self.embed, self.head = nn.Embedding(19, 12), nn.Linear(12, 19, bias=False)
        self.mix = nn.ModuleList(nn.Linear(12, 36) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))
        self.double()

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        x, place, f, shown = self.embed(input_ids), self.place, self.function.apply, []
        for mix, up in zip(self.mix, self.up, strict=True):
            q, k, v = mix(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
            k, v = (f(k), f(v)) if place == "states" else (k, v)
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            x = x + (f(up(x).sin()) if place == "layers" else up(x).sin())
            shown += [f(x * 2)] if place == "beside" else []
        logits = f(self.head(x)) if place == "logits" else self.head(x)
        targets = F.pad(labels, (0, 1), value=-100)[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), *shown


@pytest.mark.parametrize("scale", sample([1.0, 0.5], 0.5))
@pytest.mark.parametrize("place", ["layers", "states", "logits", "beside"])
@pytest.mark.parametrize("name", sample(NOT_LINEAR, "Regularised"))
@pytest.mark.filterwarnings("ignore::streambp_fx.StreamBPWarning")
def test_backwards_that_are_not_linear(name: str, place: str, scale: float) -> None:
    """Exact in rows without a label, under a loss that is scaled, and where no gradient comes."""
    torch.manual_seed(0)
    eager = Penalised(NOT_LINEAR[name], place)
    streamed = copy.deepcopy(eager)
    call = transform(streamed, logits="keep", check="never")
    for length, ends in ((41, (12, 30)), (33, (33, 33))):
        ids = torch.randint(19, (2, length))
        labels = ids.where(torch.arange(length) < torch.tensor(ends)[:, None], -100)
        for model, forward in ((eager, eager), (streamed, call)):
            model.zero_grad()
            (forward(ids, labels)[0] * scale).backward()
        assert_close_grads(grads(streamed), grads(eager), 1e-10)
    schedule = streambp_fx.schedule(call)
    unchunked = [s.reason for s in schedule.segments if not s.chunked and s.reason]
    assert len(unchunked) == (2 if place == "beside" else 0), unchunked


@pytest.mark.slow
def test_linear_backwards_leave_rows_out() -> None:
    """What is proved to be linear costs nothing: rows without a part in the loss are not run."""
    model = transform(with_function(Normalised))
    model(**padded(65, "right")).loss.backward()
    assert "all rows are run" not in str(streambp_fx.schedule(model))
    other = transform(with_function(Clipped))
    other(**padded(65, "right")).loss.backward()
    assert "a custom autograd function may not be linear backwards" in str(streambp_fx.schedule(other))


# -- several operands and results ------------------------------------------------------------------------


class Gate(torch.autograd.Function):
    """Two operands with rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return F.silu(x) * y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        s = torch.sigmoid(x)
        return gradient * y * s * (1 + x * (1 - s)), gradient * F.silu(x)


class Halves(torch.autograd.Function):
    """Two results, one narrower."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x.mean(-1)

    @staticmethod
    def backward(ctx: Any, wide: Tensor, narrow: Tensor) -> Tensor:
        return wide * 2 + narrow.unsqueeze(-1) / wide.shape[-1]


class Told(torch.autograd.Function):
    """The caller hands over how many rows there are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int) -> Tensor:
        ctx.rows = rows
        return x * (rows / 50)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * (ctx.rows / 50), None


class Swapped(nn.Module):
    """An MLP whose activation is made by a function."""

    kinds: ClassVar[dict[str, Any]] = {
        "gate": lambda gate, up: Gate.apply(gate, up),
        "two results": lambda gate, up: (
            (lambda pair: pair[0] * pair[1].unsqueeze(-1))(Halves.apply(gate)) + up
        ),
        "told": lambda gate, up: Told.apply(gate, gate.shape[1]) + up,
    }

    def __init__(self, inner: Any, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = inner, kind

    def forward(self, x: Tensor) -> Tensor:
        inner = self.inner
        return inner.down_proj(self.kinds[self.kind](inner.gate_proj(x), inner.up_proj(x)))


def swapped(kind: str) -> Any:
    model = build("llama")
    model.model.layers[0].mlp = Swapped(model.model.layers[0].mlp, kind)
    return model


@pytest.mark.parametrize("kind", sample(Swapped.kinds))
@pytest.mark.filterwarnings("ignore::streambp_fx.StreamBPWarning")
def test_operands_and_results(kind: str) -> None:
    unchunked = 0 if kind == "gate" else None
    _, streamed = check_exact(functools.partial(swapped, kind), BATCHES, unchunked=unchunked)
    if kind == "gate":
        assert_all_chunked(streamed)


@pytest.mark.slow
def test_samples_end_where_they_do_elsewhere() -> None:
    """Padding behind the rows of a sample is not run: the samples are apart in such functions as well."""
    model = transform(with_linears(QuantisedLinear))
    model(**padded(65, "right")).loss.backward()
    assert "Quantised" not in str(streambp_fx.schedule(model))
    assert "custom_function" not in str(streambp_fx.schedule(model)), "no reason why samples are not apart"
