"""Random programs: what people do to a hidden state in place and through views, and to scores.

A program is drawn before the model runs, as a list of steps, so that eager and streamed run the same one.
Autograd refuses some of them, and some are not finite; who draws one tries it with eager first.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from adversaries.views import SEVERAL, VIEWS
from e2e_subject import HUGE, NEVER, Subject, grid, joined, later
from torch import Tensor

Step = Callable[[Subject, Tensor, Tensor, list[Tensor]], None]
Apply = Callable[[Subject, Tensor, Tensor, Tensor], Tensor]

# Values of the shape (batch, T, width), of one of them, `h`.
FRESH: dict[str, Apply] = {
    "lin": lambda m, x, ids, h: m.lin(h),
    "lin2": lambda m, x, ids, h: m.lin2(h),
    "sin": lambda m, x, ids, h: h.sin(),
    "gated": lambda m, x, ids, h: h * m.lin(x).sigmoid(),
    "scaled": lambda m, x, ids, h: h * m.scale,
    "norm": lambda m, x, ids, h: m.norm(h),
    "channels rolled": lambda m, x, ids, h: h.roll(2, -1),
    "clone": lambda m, x, ids, h: h.clone(),
    "detached": lambda m, x, ids, h: h.detach(),
    "detached clone": lambda m, x, ids, h: h.detach().clone(),
    "zeros": lambda m, x, ids, h: torch.zeros_like(h),
    "embedded": lambda m, x, ids, h: m.table[ids],
    "positions": lambda m, x, ids, h: m.table[: x.shape[1]].expand_as(x).clone(),
    "chosen": lambda m, x, ids, h: torch.where((ids % 2 == 0)[..., None], h, h.tanh()),
    "cumulated": lambda m, x, ids, h: h.cumsum(1) / 9,
    "shifted": lambda m, x, ids, h: F.pad(h, (0, 0, 1, 0))[:, :-1],
    "attended": lambda m, x, ids, h: m.attend(h),
    "in halves": lambda m, x, ids, h: torch.cat(h.chunk(2, -1)[::-1], -1),
}

# Changes of a value of any shape, which broadcasts to itself: (y) -> None.
CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "mul_": lambda y: y.mul_(0.5),
    "add_": lambda y: y.add_(0.25),
    "sub_": lambda y: y.sub_(0.125),
    "div_": lambda y: y.div_(1.5),
    "clamp_": lambda y: y.clamp_(-0.8, 0.7) if not y.is_complex() else y.mul_(0.9),
    "neg_": lambda y: y.neg_(),
    "zero_": lambda y: y.zero_(),
    "fill_": lambda y: y.fill_(0.3),
    "sigmoid_": lambda y: y.sigmoid_(),
    "tanh_": lambda y: y.tanh_(),
    "relu": lambda y: F.relu(y, inplace=True) if not y.is_complex() else y.sin_(),
    "dropout of nothing": lambda y: F.dropout(y, 0.0, True, inplace=True),
    "copy_": lambda y: y.copy_(y.sin()),
    "copy of itself": lambda y: y.copy_(y.clone() * 0.7 + 0.1),
    "masked_fill_": lambda y: y.masked_fill_(y.detach().abs() < 0.1, 0.2),
    "setitem": lambda y: y.__setitem__((..., 0), 0.5),
    "setitem of a slice": lambda y: y.__setitem__((..., slice(1, None)), 0.25),
    "setitem of all": lambda y: y.__setitem__(slice(None), y * 2),
    "setitem by a mask": lambda y: y.__setitem__(y.detach().abs() < 0.2, 0.1),
    "plus equals of a part": lambda y: y[..., :1].add_(1.0),
    "lerp_": lambda y: y.lerp_(torch.ones_like(y), 0.25),
    "addcmul_": lambda y: y.addcmul_(torch.ones_like(y), torch.ones_like(y), value=0.2),
    "square_": lambda y: y.square_(),
    "data": lambda y: y.data.mul_(0.75),
    "detach": lambda y: y.detach().add_(0.1),
}


@dataclass(frozen=True)
class Program:
    """Steps over a list of values, the first of which is a projection of the block's input."""

    said: tuple[str, ...]
    steps: tuple[Step, ...]

    def __call__(self, m: Subject, x: Tensor, ids: Tensor) -> Tensor:
        values = [m.lin(x)]
        for step in self.steps:
            step(m, x, ids, values)
        return x + sum(v * (0.5 + 0.25 * k) for k, v in enumerate(values))  # type: ignore[return-value]


def _fresh(choose: random.Random, count: int) -> tuple[str, Step]:
    name, of = choose.choice(sorted(FRESH)), choose.randrange(count)
    return f"{count} = {name} of {of}", lambda m, x, ids, vs: vs.append(FRESH[name](m, x, ids, vs[of]))


def _read(choose: random.Random, count: int) -> tuple[str, Step]:
    """A view that is made now and read later, as a value of its own."""
    name, of = choose.choice(sorted(VIEWS)), choose.randrange(count)
    view, back = VIEWS[name]
    return f"{count} = {name} of {of}", lambda m, x, ids, vs: vs.append(_whole(back(view(vs[of]), vs[of]), x))


def _whole(y: Tensor, x: Tensor) -> Tensor:
    return y if y.shape == x.shape else y.expand_as(x).clone()


def _change(choose: random.Random, count: int) -> tuple[str, Step]:
    """A value changed, itself or through a view, with autograd or without."""
    names = [None, None, *(n for n in sorted(VIEWS) if n not in SEVERAL)]
    through, what, of = choose.choice(names), choose.choice(sorted(CHANGES)), choose.randrange(count)
    quiet = choose.random() < 0.2
    said = f"{what} of {of}" + (f" through {through}" if through else "") + (", no grad" if quiet else "")

    def step(m: Subject, x: Tensor, ids: Tensor, vs: list[Tensor]) -> None:
        with torch.set_grad_enabled(not quiet):
            CHANGES[what](VIEWS[through][0](vs[of]) if through else vs[of])

    return said, step


def _operand(choose: random.Random, count: int) -> tuple[str, Step]:
    """A value changed by another one, the whole or some channels of it."""
    into, of = choose.randrange(count), choose.randrange(count)
    low = choose.choice([0, 0, 3])
    op = choose.choice(["add_", "mul_", "sub_", "copy_", "setitem", "iadd"])

    def step(m: Subject, x: Tensor, ids: Tensor, vs: list[Tensor]) -> None:
        y, other = vs[into][..., low:], vs[of][..., low:] if into != of else vs[of][..., low:].sin()
        if op == "setitem":
            vs[into][..., low:] = other
        elif op == "iadd":
            vs[into][..., low:] += other
        else:
            getattr(y, op)(other)

    return f"{op} of {into} by {of} from channel {low}", step


def hidden_program(seed: int) -> Program:
    """Two to seven steps on hidden states."""
    choose = random.Random(seed)
    said: list[str] = []
    steps: list[Step] = []
    count = 1
    for _ in range(choose.randint(2, 7)):
        kind = choose.choice([_fresh, _read, _change, _change, _operand])
        text, step = kind(choose, count)
        count += kind in (_fresh, _read)
        said.append(text)
        steps.append(step)
    return Program(tuple(said), tuple(steps))


# ---- scores

MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "later": later,
    "later or far": lambda x: later(x) | (grid(x)[1] < grid(x)[0] - 6),
    "later but a prefix": lambda x: later(x) & (grid(x)[1] >= 5),
    "blocks": lambda x: grid(x)[0] // 6 != grid(x)[1] // 6,
    "later or odd": lambda x: later(x) | ((grid(x)[0] - grid(x)[1]) % 2 == 1),
    "earlier": lambda x: later(x).T,
    "one ahead": lambda x: grid(x)[1] > grid(x)[0] + 1,
    "not itself": lambda x: later(x) | ((grid(x)[0] == grid(x)[1]) & (grid(x)[0] > 0)),
}

HIDES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "filled": lambda s, h: s.masked_fill(h, NEVER),
    "filled with a huge number": lambda s, h: s.masked_fill(h, HUGE),
    "filled with -30": lambda s, h: s.masked_fill(h, -30.0),
    "filled with 0": lambda s, h: s.masked_fill(h, 0.0),
    "where": lambda s, h: torch.where(h, NEVER, s),
    "added": lambda s, h: s + torch.zeros_like(h, dtype=s.dtype).masked_fill(h, NEVER),
    "added, huge": lambda s, h: s + torch.zeros_like(h, dtype=s.dtype).masked_fill(h, HUGE),
    "added by alpha": lambda s, h: torch.add(s, h.to(s.dtype), alpha=-1e4),
    "subtracted": lambda s, h: s - h.to(s.dtype) * 1e4,
    "multiplied": lambda s, h: s * (~h).to(s.dtype),
    "in place": lambda s, h: (s * 1).masked_fill_(h, NEVER),
    "in place through heads": lambda s, h: _through_heads(s * 1, h),
}

MORE: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda s: s.softmax(-1),
    "softmax by rows": lambda s: s.softmax(-2),
    "sigmoid": lambda s: s.sigmoid() / 5,
    "relu": lambda s: s.relu() / 5,
    "exp": lambda s: s.clamp(max=3).exp() / 9,
    "softcap": lambda s: 2 * (s / 2).tanh(),
    "scaled": lambda s: s * 0.7,
    "negated": lambda s: -s.clamp(-50, 50),
    "scaled by 0": lambda s: s.clamp(-50, 50) * 0.0,
    "clamped": lambda s: s.clamp(min=-2.0),
    "squared": lambda s: s.clamp(-9, 9).square(),
    "plus one": lambda s: s + 0.05,
    "normalised": lambda s: s / (s.abs().sum(-1, keepdim=True) + 1),
    "normalised by columns": lambda s: s / (s.abs().sum(-2, keepdim=True) + 1),
    "max subtracted": lambda s: s - s.amax(-1, keepdim=True),
    "dropout of nothing": lambda s: F.dropout(s, 0.0),
    "transposed": lambda s: s.mT,
    "flipped": lambda s: s.flip(-1),
    "cumulated": lambda s: s.clamp(-9, 9).cumsum(-1) / 9,
    "tril": lambda s: s.clamp(-9, 9).tril(),
    "triu": lambda s: s.clamp(-9, 9).triu(-2),
    "heads mixed": lambda s: s.clamp(-50, 50).mean(1, keepdim=True) + s,
    "nan to 0": lambda s: s.nan_to_num(0.0, neginf=-5.0),
    "contiguous": lambda s: s.contiguous(),
    "halved in place": lambda s: (s + 0).mul_(0.5),
}


def _through_heads(s: Tensor, h: Tensor) -> Tensor:
    s.flatten(0, 1).masked_fill_(h, NEVER)
    return s


@dataclass(frozen=True)
class Scores:
    """Attention by hand: scores, what is done to them, weights times values."""

    said: tuple[str, ...]
    steps: tuple[Callable[[Tensor, Tensor], Tensor], ...]

    def __call__(self, m: Subject, x: Tensor, ids: Tensor) -> Tensor:
        s = m.scores(x)
        for step in self.steps:
            s = step(s, x)
        return x + joined(s @ m.v(x).unflatten(-1, (3, -1)).transpose(1, 2))


def scores_program(seed: int) -> Scores:
    """A mask, mostly a causal one, two to six steps and mostly a softmax among them."""
    choose = random.Random(seed)
    said: list[str] = []
    steps: list[Callable[[Tensor, Tensor], Tensor]] = []

    def hide() -> None:
        mask = "later" if choose.random() < 0.6 else choose.choice(sorted(MASKS))
        how = choose.choice(sorted(HIDES))
        said.append(f"{mask}, {how}")
        steps.append(lambda s, x: HIDES[how](s, MASKS[mask](x)))

    def more(name: str) -> None:
        said.append(name)
        steps.append(lambda s, x: MORE[name](s))

    for _ in range(choose.randint(0, 1)):
        more(choose.choice(sorted(MORE)))
    hide()
    more("softmax" if choose.random() < 0.6 else choose.choice(sorted(MORE)))
    for _ in range(choose.choice([0, 0, 1, 2, 3])):
        hide() if choose.random() < 0.25 else more(choose.choice(sorted(MORE)))
    return Scores(tuple(said), tuple(steps))
