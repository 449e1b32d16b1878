"""Changes in place, seen through views: each view, itself changed or its base, with autograd and without."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from e2e_adversary import STREAMED, WHATEVER, Cases
from e2e_subject import HEADS, WIDTH, Subject
from torch import Tensor, nn

CASES = Cases("views")

# name -> (view of a (batch, T, width) value, back to (batch, T, something that broadcasts with the width))
VIEWS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "flatten": (lambda h: h.flatten(0, 1), lambda y, h: y.view(h.shape)),
    "unflatten": (lambda h: h.unflatten(-1, (HEADS, -1)), lambda y, h: y.flatten(2)),
    "view": (lambda h: h.view(*h.shape[:2], HEADS, -1), lambda y, h: y.flatten(2)),
    "view flat": (lambda h: h.view(-1), lambda y, h: y.view(h.shape)),
    "ravel": (lambda h: h.ravel(), lambda y, h: y.view(h.shape)),
    "reshape": (lambda h: h.reshape(-1, WIDTH), lambda y, h: y.view(h.shape)),
    "movedim": (lambda h: h.movedim(1, 0), lambda y, h: y.movedim(0, 1)),
    "moveaxis": (lambda h: torch.moveaxis(h, 2, 1), lambda y, h: y.movedim(1, 2)),
    "swapaxes": (lambda h: h.swapaxes(1, 2), lambda y, h: y.swapaxes(1, 2)),
    "swapdims": (lambda h: h.swapdims(0, 1), lambda y, h: y.swapdims(0, 1)),
    "transpose": (lambda h: h.transpose(0, 1), lambda y, h: y.transpose(0, 1)),
    "permute": (lambda h: h.permute(2, 0, 1), lambda y, h: y.permute(1, 2, 0)),
    "mT": (lambda h: h.mT, lambda y, h: y.mT),
    "mH": (lambda h: h.mH, lambda y, h: y.mH),
    "adjoint": (lambda h: h.adjoint(), lambda y, h: y.adjoint()),
    "view_as": (lambda h: h.view_as(h), lambda y, h: y),
    "reshape_as": (lambda h: h.reshape_as(h), lambda y, h: y),
    "expand": (lambda h: h.expand(-1, -1, -1), lambda y, h: y),
    "expand_as": (lambda h: h.expand_as(h), lambda y, h: y),
    "broadcast_to": (lambda h: h.broadcast_to(h.shape), lambda y, h: y),
    "broadcast_tensors": (lambda h: torch.broadcast_tensors(h, h)[0], lambda y, h: y),
    "narrow": (lambda h: h.narrow(2, 1, 5), lambda y, h: y.mean(-1, keepdim=True)),
    "narrow rows": (lambda h: h.narrow(1, 0, h.shape[1]), lambda y, h: y),
    "slice": (lambda h: h[..., 2:9], lambda y, h: y.sum(-1, keepdim=True)),
    "strided slice": (lambda h: h[..., ::2], lambda y, h: y.sum(-1, keepdim=True)),
    "whole slice": (lambda h: h[:], lambda y, h: y),
    "ellipsis": (lambda h: h[...], lambda y, h: y),
    "none": (lambda h: h[:, None], lambda y, h: y[:, 0]),
    "select": (lambda h: h.select(-1, 3), lambda y, h: y.unsqueeze(-1)),
    "index": (lambda h: h[..., -2], lambda y, h: y.unsqueeze(-1)),
    "squeeze": (lambda h: h.unsqueeze(-1).squeeze(-1), lambda y, h: y),
    "squeeze all": (lambda h: h.unsqueeze(1).squeeze(), lambda y, h: y.view(h.shape)),
    "squeeze dims": (lambda h: h.unsqueeze(1).squeeze((1,)), lambda y, h: y),
    "chunk": (lambda h: h.chunk(2, -1)[1], lambda y, h: y.repeat(1, 1, 2)),
    "one chunk": (lambda h: h.chunk(1, -1)[0], lambda y, h: y),
    "split": (lambda h: h.split([5, 7], -1)[0], lambda y, h: y.sum(-1, keepdim=True)),
    "tensor_split": (lambda h: h.tensor_split(4, -1)[2], lambda y, h: y.repeat(1, 1, 4)),
    "dsplit": (lambda h: torch.dsplit(h, 3)[1], lambda y, h: y.repeat(1, 1, 3)),
    "unbind": (lambda h: h.unbind(-1)[4], lambda y, h: y[..., None]),
    "view_as_complex": (
        lambda h: torch.view_as_complex(h.unflatten(-1, (-1, 2))),
        lambda y, h: torch.view_as_real(y).flatten(2),
    ),
    "real part": (
        lambda h: torch.view_as_complex(h.unflatten(-1, (-1, 2))).real,
        lambda y, h: y.repeat(1, 1, 2),
    ),
    "imaginary part": (
        lambda h: torch.view_as_complex(h.unflatten(-1, (-1, 2))).imag,
        lambda y, h: y.repeat(1, 1, 2),
    ),
    "diagonal of channels": (
        lambda h: h.unflatten(-1, (3, 4)).diagonal(0, 2, 3),
        lambda y, h: y.sum(-1, keepdim=True),
    ),
    "contiguous": (lambda h: h.contiguous(), lambda y, h: y),
    "to": (lambda h: h.to(torch.float64), lambda y, h: y),
    "double": (lambda h: h.double(), lambda y, h: y),
    "type_as": (lambda h: h.type_as(h), lambda y, h: y),
    "real of real": (lambda h: torch.real(h), lambda y, h: y),
    "conj of real": (lambda h: h.conj(), lambda y, h: y),
    "resolve_conj": (lambda h: h.resolve_conj(), lambda y, h: y),
    "positive": (lambda h: h.positive(), lambda y, h: y),
    "atleast_3d": (lambda h: torch.atleast_3d(h), lambda y, h: y),
    "dropout p=0": (lambda h: F.dropout(h, 0.0, True), lambda y, h: y),
    "dropout in evaluation": (lambda h: F.dropout(h, 0.5, False), lambda y, h: y),
    "identity module": (lambda h: torch.nn.Identity()(h), lambda y, h: y),
    "view of a view": (
        lambda h: h.flatten(0, 1).unflatten(-1, (3, 4)).select(1, 1),
        lambda y, h: y.view(*h.shape[:2], 4).repeat(1, 1, 3),
    ),
    "cat of one": (lambda h: torch.cat([h], -1), lambda y, h: y),
    "clone": (lambda h: h.clone(), lambda y, h: y),
}
# Not causal, nothing that a rule knows, or what functionalization makes for one length only (a change of an
# `unfold`): exact all the same.
UNKNOWN = {
    "unfold channels": (lambda h: h.unfold(2, 3, 3), lambda y, h: y.flatten(2)),
    "unfold rows": (lambda h: h.unfold(1, 1, 1), lambda y, h: y.squeeze(-1)),
    "as_strided": (lambda h: h.as_strided(h.size(), h.stride()), lambda y, h: y),
    "diagonal across rows": (
        lambda h: h.diagonal(0, 1, 2),
        lambda y, h: y.sum(-1)[:, None, None],
    ),
    "first row": (lambda h: h[:, 0], lambda y, h: y[:, None]),
    "last row": (lambda h: h[:, -1], lambda y, h: y[:, None]),
    "first sample": (lambda h: h[0], lambda y, h: y[None]),
    "all but the first row": (lambda h: h[:, 1:], lambda y, h: F.pad(y, (0, 0, 1, 0))),
    "even rows": (lambda h: h[:, ::2], lambda y, h: y.repeat_interleave(2, 1)[:, : h.shape[1]]),
    "narrowed rows": (lambda h: h.narrow(1, 2, 5), lambda y, h: y.mean(1, keepdim=True)),
    "chunk of rows": (lambda h: h.chunk(3, 1)[0], lambda y, h: y.mean(1, keepdim=True)),
    "windows of rows": (lambda h: h.unfold(1, 4, 4), lambda y, h: y.mean((1, 3))[:, None]),
    "as_strided shift": (
        lambda h: h.as_strided((h.shape[0], h.shape[1] - 1, WIDTH), h.stride(), WIDTH),
        lambda y, h: F.pad(y, (0, 0, 1, 0)),
    ),
}


def _view_changed(view, back):
    def block(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
        h = m.lin(x)
        y = view(h)
        y.mul_(0.5)
        return x + h

    return block


def _base_changed(view, back):
    def block(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
        h = m.lin(x)
        y = view(h)
        h.mul_(0.5)
        return x + h.sin() + back(y, h) * 0.3

    return block


def _without_grad(view, back):
    def block(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
        h = m.lin(x)
        with torch.no_grad():
            view(h).mul_(0.5)
        return x + h

    return block


def _through_detach(view, back):
    def block(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
        h = m.lin(x)
        y = view(h.detach())
        y.add_(0.25)
        return x + h * 2 + back(y, h) * m.scale

    return block


def _read_before(view, back):
    def block(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
        h = m.lin(x)
        before = h + 1
        seen = back(view(h), h) - 2
        view(h).add_(0.25)
        return x + (before * h).tanh() + seen * m.scale + before

    return block


WAYS = {
    "view changed": _view_changed,
    "base changed": _base_changed,
    "without grad": _without_grad,
    "through detach": _through_detach,
    "read before": _read_before,
}
# Autograd allows no change of these, nor of what they are views of.
SEVERAL = ("chunk", "one chunk", "split", "unbind", "chunk of rows")
# Autograd does not see these changes, which may be a reason to leave a model unstreamed.
UNSEEN = ("without grad", "through detach")
TOGETHER = 6
for _way, _make in WAYS.items():
    _allowed = SEVERAL if _way in UNSEEN else ()
    _names = sorted(n for n in VIEWS if n not in SEVERAL or n in _allowed)
    for _first in range(0, len(_names), TOGETHER):
        _blocks = {f"{n}, {_way}": _make(*VIEWS[n]) for n in _names[_first : _first + TOGETHER]}
        CASES.blocks(_blocks, want=WHATEVER if _way in UNSEEN else STREAMED)
    for _name, (_view, _back) in UNKNOWN.items():
        if _name in SEVERAL and not _allowed:
            continue
        CASES.block(name=f"{_name}, {_way}", want=WHATEVER)(_make(_view, _back))


@CASES.block(parts=lambda: {"other": nn.Linear(WIDTH, WIDTH)}, want=STREAMED)
def the_only_piece_of_a_value(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """A factor of one goes, and what was its result is read on; the piece fills its memory."""
    h = m.lin(x)
    (piece,) = (h * 1.0).split(WIDTH, -1)
    return x + m.other(piece.exp().sin()) + h.cos()
