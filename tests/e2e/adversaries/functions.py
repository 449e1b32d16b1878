"""Autograd functions of the user's own, whose gradient is not that of their forward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from e2e_adversary import REFUSED, WARNED, WHATEVER, Cases
from e2e_subject import Subject
from torch import Tensor

CASES = Cases("functions")


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 2


class Reversed(torch.autograd.Function):
    """A gradient that mixes rows, under a forward that does not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.flip(1) * 2


class NormedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g / (g.norm() + 1e-3)


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(0.5)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 0.25


class OfAWeight(torch.autograd.Function):
    """The author's gradient of a weight is its sign: of the sum over all rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g @ w, (g.flatten(0, 1).T @ x.flatten(0, 1)).sign() * 0.01


for _function in (Doubled, Reversed, NormedGradient):
    CASES.block(WHATEVER, name=_function.__name__)(lambda m, x, ids, f=_function: x + f.apply(m.lin(x)))
# Dynamo may refuse what it marks as changed.
CASES.block({"compile": WHATEVER, "transform": f"{WHATEVER}|{REFUSED}"}, name="InPlace")(
    lambda m, x, ids: x + InPlace.apply(m.lin(x))
)
CASES.block(WHATEVER, name="OfAWeight")(lambda m, x, ids: x + OfAWeight.apply(x, m.lin.weight))


class Changed(torch.autograd.Function):
    """A function of a weight, with a backward that is linear in the gradient or not."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, change: str) -> Tensor:
        ctx.change = change
        ctx.save_for_backward(w)
        return w.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (w,) = ctx.saved_tensors
        made = {
            "clipped": lambda: g.clamp(-1e-3, 1e-3),
            "signed": lambda: g.sign(),
            "normed": lambda: g / g.norm(),
            "shifted": lambda: g + 1,
            "through": lambda: g * (w.abs() < 1),
            "filled": lambda: g.masked_fill(w.abs() > 1, 0) / 3,
        }
        return made[ctx.change](), None


for _change in ("clipped", "signed", "normed", "shifted", "through", "filled"):
    CASES.block(WHATEVER, name=f"gradient of a weight, {_change}")(
        lambda m, x, ids, how=_change: (
            x + F.linear(x, Changed.apply(m.lin.weight, how)) + m.lin2(x) * Changed.apply(m.scale, how)
        )
    )


class Nothing(torch.autograd.Function):
    """Its second operand gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        return x + w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g, None


CASES.block(WHATEVER, name="no gradient for a weight")(lambda m, x, ids: x + Nothing.apply(m.lin(x), m.scale))


class NoneGradients(torch.autograd.Function):
    """Its backward asks whether the second output has a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return x.sin(), x.cos()

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor | None) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * x.cos() + (g * 3 if h is None else -h * x.sin())


class NoneOfOne(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> Tensor | None:
        return None if g is None else g * 2


CASES.block(
    {"compile": WHATEVER, "transform": f"{WHATEVER}|{REFUSED}"}, name="None for an output that is not used"
)(lambda m, x, ids: x + NoneGradients.apply(m.lin(x))[0] * m.scale)
CASES.block(
    {"compile": WHATEVER, "transform": f"{WHATEVER}|{REFUSED}"}, name="None for an output that is used"
)(lambda m, x, ids: x + sum(NoneGradients.apply(m.lin(x))) * m.scale)
CASES.block(name="None for the one output")(lambda m, x, ids: x + NoneOfOne.apply(m.lin(x)))


# ---- transforms of functions

FORMS = {
    "vmap over samples": lambda f, x: torch.vmap(f)(x),
    "vmap over rows": lambda f, x: torch.vmap(f, 1, 1)(x),
    "vmap twice": lambda f, x: torch.vmap(torch.vmap(f))(x),
    "grad": lambda f, x: torch.func.grad(lambda u: f(u).sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](x)[0],
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x.cos(),))[1],
}
for _name, _form in FORMS.items():
    CASES.block(WHATEVER, name=f"{_name} in the forward")(
        lambda m, x, ids, form=_form: x + form(lambda u: (u * m.scale).tanh() * 2, m.lin(x))
    )


@CASES.block(WHATEVER)
def a_mask_made_by_vmap(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    i = torch.arange(x.shape[1])
    mask = torch.vmap(torch.vmap(lambda a, b: b <= a, (None, 0)), (0, None))(i, i)
    q, v = m.lin(x)[:, None], m.lin2(x)[:, None]
    return x + F.scaled_dot_product_attention(q, v, v, attn_mask=mask)[:, 0]


@CASES.block(WHATEVER)
def a_vmap_that_changes_in_place(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    return x + torch.vmap(lambda u: u.sin().mul_(2).add_(1))(m.lin(x))


@torch.library.custom_op("streambp_tests::turned", mutates_args=())
def _turned(x: Tensor, weight: Tensor) -> Tensor:
    return x.flip(1) @ weight


@_turned.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(x)


def _turned_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    of_weight = torch.einsum("btd,bte->de", ctx.saved_tensors[0].flip(1), gradient)
    return (gradient @ ctx.saved_tensors[1].T).flip(1), of_weight


_turned.register_autograd(
    _turned_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


@CASES.block(WARNED, name="an op that asks twice for what it has saved, before rows")
def _asks_twice(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    x = x + torch.ops.streambp_tests.turned(x, m.lin.weight)
    return x + m.lin2(F.gelu(x))
