"""Forms of ops that a rule must accept, or refuse, for a reason of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from graphs import WIDTH, OneLayer, one_layer, reasons
from torch import Tensor

aten = torch.ops.aten
Body = Callable[[OneLayer, Tensor], Tensor]


def whole(x: Tensor) -> Tensor:
    """Whole numbers of rows that depend on a parameter."""
    return (x * 9).to(torch.int64)


def halves(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, -1))


# Elementwise, and not tagged as such by PyTorch.
ELEMENTWISE: dict[str, Body] = {
    "rsub.Tensor": lambda m, x: aten.rsub.Tensor(x, x * 2),
    "floor_divide.default": lambda m, x: aten.floor_divide.default(whole(x), 3) * x,
    "hardswish.default": lambda m, x: F.hardswish(x),
    "log_sigmoid.default": lambda m, x: F.logsigmoid(x),
    "where.ScalarOther": lambda m, x: aten.where.ScalarOther(x > 0, x, 1.0),
    "where.ScalarSelf": lambda m, x: aten.where.ScalarSelf(x > 0, 1.0, x),
    "where.Scalar": lambda m, x: aten.where.Scalar(x > 0, 1.0, 2.0) * x,
    "masked_fill.Tensor": lambda m, x: x.masked_fill(x > 0, torch.tensor(0.5)),
    "__and__.Tensor": lambda m, x: x.masked_fill(aten.__and__.Tensor(x > 0, x < 1), 0.5),
    "__or__.Tensor": lambda m, x: x.masked_fill(aten.__or__.Tensor(x > 0, x < -1), 0.5),
    "detach.default": lambda m, x: x * x.detach(),
    "contiguous.default": lambda m, x: x.mT.contiguous().mT * 2,
    "to.dtype": lambda m, x: x.to(torch.float64).mul(2).to(x.dtype),
    "type_as.default": lambda m, x: (x > 0).type_as(x) * x,
    "zeros_like.default": lambda m, x: torch.where(x > 0, x, torch.zeros_like(x)),
    "ones_like.default": lambda m, x: x + torch.ones_like(x),
    "full_like.default": lambda m, x: x + torch.full_like(x, 3.0),
    "polar.default": lambda m, x: torch.view_as_real(torch.polar(x.abs(), x)).sum(-1),
    "complex.default": lambda m, x: torch.view_as_real(torch.complex(x, x * 2)).sum(-1),
    "_conj.default": lambda m, x: torch.view_as_real(torch.complex(x, x * 2).conj().resolve_conj()).sum(-1),
    "real.default": lambda m, x: torch.complex(x, x * 2).real,
    "imag.default": lambda m, x: torch.complex(x, x * 2).imag,
}
# Others that keep rows apart.
APART: dict[str, Body] = {
    "one_hot": lambda m, x: F.one_hot(x.argmax(-1), WIDTH).to(x.dtype) * x,
    "an index on dims side by side": lambda m, x: (
        x.unflatten(-1, (2, -1))[:, :, [1, 0], [0, 1]].sum(-1, True) * x
    ),
    "a part of a row": lambda m, x: torch.cat([x.narrow(2, 1, 3), x.narrow(2, 0, WIDTH - 3)], -1),
    "topk of a row": lambda m, x: x + x.topk(2, -1).values.sum(-1, keepdim=True),
    "a scatter into a row": lambda m, x: torch.zeros_like(x).scatter(-1, x.topk(2, -1).indices, 1.0) * x,
    "a gather from a row": lambda m, x: x.gather(-1, x.topk(WIDTH, -1).indices),
    "a running sum of a row": lambda m, x: x.cumsum(-1),
    "a sorted row": lambda m, x: x.sort(-1).values,
}
REFUSED: dict[str, tuple[Body, str]] = {
    "an index on dims apart": (
        lambda m, x: x + x.view(*x.shape[:2], 2, 2, -1)[:, :, [1, 0], :, [0, 1]].mean() * x,
        "next to each other",
    ),
    "topk of rows": (
        lambda m, x: x + x.topk(2, 1).values.sum(1, keepdim=True),
        "selection along the sequence",
    ),
    "a scatter along rows": (
        lambda m, x: x.scatter(1, torch.zeros_like(whole(x)), 1.0),
        "scatter along the sequence",
    ),
    "a gather along rows": (
        lambda m, x: x.gather(1, torch.zeros_like(whole(x))),
        "gather along the sequence",
    ),
    "a running sum of rows": (lambda m, x: x.cumsum(1), "scan along the sequence"),
    "a softmax of rows": (lambda m, x: x.softmax(1), "softmax over the sequence"),
    "the largest row": (lambda m, x: x + x.amax(1, keepdim=True), "reduction over the sequence"),
    "a normalisation of rows": (
        lambda m, x: F.layer_norm(x.mT, (x.shape[1],)).mT,
        "normalisation over the sequence",
    ),
    "a one_hot as wide as it must be": (lambda m, x: F.one_hot(x.argmax(-1)).sum(-1, keepdim=True) * x, ""),
}


@pytest.mark.parametrize("name", [*ELEMENTWISE, *APART])
def test_accepted(name: str) -> None:
    facts = one_layer({**ELEMENTWISE, **APART}[name])
    if name in ELEMENTWISE:
        assert f"aten.{name}" in {str(n.target) for n in facts.nodes}, [str(n.target) for n in facts.nodes]
    assert not facts.refusals and not reasons(facts)
    assert not facts.faults


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    body, words = REFUSED[name]
    try:
        facts = one_layer(body)
    except Exception as error:  # not captured, which is a refusal as well
        assert not words, error
        return
    assert any(words in reason for reason in facts.refusals.values()), facts.refusals
    assert not facts.faults


def test_entries_from_a_place_on_are_a_slice() -> None:
    facts = one_layer(APART["a part of a row"])
    targets = {n.target for n in facts.nodes}
    assert aten.slice.Tensor in targets and aten.narrow.default not in targets
