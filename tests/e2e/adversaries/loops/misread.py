"""Loops that look like a step and do something else behind it: what adversaries found."""

from __future__ import annotations

from typing import Any

import torch
from e2e_adversary import REFUSED, WHATEVER
from e2e_subject import WIDTH, Subject
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .parts import block


@block(WHATEVER)
def a_state_that_is_added_to_by_another_name(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h, made = m.lin(x[:, 0]), []
    first = h
    for t in range(x.shape[1]):
        h += x[:, t]
        made.append(h * 1.0)
    return x + torch.stack(made, 1) + first[:, None]


@block(WHATEVER)
def a_state_that_is_added_to_in_a_list(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h, made = m.lin(x[:, 0]), []
    for t in range(x.shape[1]):
        made.append(h)
        h += x[:, t]
    return x + torch.stack(made, 1)


@block(WHATEVER)
def a_count_that_is_asked_once(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    m.counts.asked = 0
    h, made = m.lin(x).mean(1), []
    for t in range(m.counts.next() + 2):
        h = 0.5 * h + x[:, t]
        made.append(h)
    return x + torch.stack(made, 1).sum(1, keepdim=True) * m.counts.asked


@block(WHATEVER)
def a_generator_in_a_function(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    factors = (0.5 if k < 10 else 0.9 for k in range(1000))
    h, made = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = torch.tanh(m.lin(x[:, t]) + h * following(factors))
        made.append(h)
    return x + torch.stack(made, 1)


def following(numbers: Any) -> float:
    return next(numbers)


@block(WHATEVER)
def a_counter_on_a_tensor(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h, made = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = numbered(torch.tanh(m.lin(x[:, t]) + h * (0.5 if getattr(h, "number", 0) < 10 else 0.9)), h)
        made.append(h)
    return x + torch.stack(made, 1)


def numbered(new: Tensor, old: Tensor) -> Tensor:
    new.number = getattr(old, "number", 0) + 1  # type: ignore[attr-defined]
    return new


@block(WHATEVER)
def a_first_row_that_does_not_show_yet(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    first = torch.zeros_like(x[:, 0])
    h, made = first, []
    for t in range(x.shape[1]):
        more = torch.relu(m.decay - 1.0) if is_other(h, first) else 0.0
        h = torch.tanh(m.lin(x[:, t]) + 0.5 * h + more)
        made.append(h)
    with torch.no_grad():
        m.decay.add_(0.7)
    return x + torch.stack(made, 1)


def is_other(a: Tensor, b: Tensor) -> bool:
    return a is not b


@block(f"{WHATEVER}|{REFUSED}")
def where_a_row_lies(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    y, h, made = x * 1.0, torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        row = y[:, t]
        h = m.lin(row) + h * (0.5 if row.storage_offset() < 10 * WIDTH else 0.9)
        made.append(h)
    return x + torch.stack(made, 1)


@block(WHATEVER)
def a_function_without_gradients(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h, made = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = gate_of(m, x[:, t]) * h + m.lin(x[:, t])
        made.append(h)
    return x + torch.stack(made, 1)


@torch.no_grad()
def gate_of(m: Subject, row: Tensor) -> Tensor:
    return torch.sigmoid(m.lin2(row))


@block(WHATEVER)
def a_function_that_changes_in_place(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h, made = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = doubled(0.3 * h) + m.lin(x[:, t])
        made.append(h)
    return x + torch.stack(made, 1)


def doubled(x: Tensor) -> Tensor:
    x.mul_(2.0)
    return x


@block(WHATEVER)
def rows_that_are_changed_after_it(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    y, h, made = x + 1.0, torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = m.lin(x[:, t]) + 0.5 * h
        made.append(y[:, t])
    y[ids == 3] = 0.0
    return x + torch.stack(made, 1) + h[:, None]


@block(WHATEVER)
def an_outer_loop_that_ends_early(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    last, h, made = x[:, 0], torch.zeros_like(x[:, 0]), []
    for k in range(2):
        for t in range(x.shape[1]):
            last = m.lin(x[:, t])
            h = h * 0.5 + last
        if k == 1:
            break
        last = torch.zeros_like(last)
        made.append(h)
    return x + torch.stack(made, 1) * last[:, None]


@block(WHATEVER)
def changed_after_it_was_written(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = torch.zeros_like(x[:, 0])
    out = torch.zeros_like(x)
    for t in range(x.shape[1]):
        h = m.lin(x[:, t]) + 0.5 * h
        out[:, t] = h
        h *= 0.5
    return x + out


@block(WHATEVER)
def changed_by_an_activation(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = torch.zeros_like(x[:, 0])
    out = torch.zeros_like(x)
    for t in range(x.shape[1]):
        h = m.lin(x[:, t]) + 0.5 * h
        out[:, t] = h
        h = F.relu(h, inplace=True)
    return x + out


@block(WHATEVER)
def is_it_the_first(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    zero = torch.zeros_like(x[:, 0])
    h = zero
    out = torch.zeros_like(x)
    for t in range(x.shape[1]):
        h = torch.tanh(m.lin(x[:, t])) if h is zero else torch.tanh(m.lin(x[:, t]) + 0.5 * h) + 1
        out[:, t] = h
    return x + out


@block(WHATEVER)
def the_next_of_an_iterator(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    numbers = iter(range(1, 100))
    h = torch.zeros_like(x[:, 0])
    out = torch.zeros_like(x)
    for t in range(x.shape[1]):
        h = torch.tanh(m.lin(x[:, t]) + h / next(numbers))
        out[:, t] = h
    return x + out


@block(WHATEVER)
def read_at_last(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = last = torch.zeros_like(x[:, 0])
    out = torch.zeros_like(x)
    try:
        for t in range(x.shape[1]):
            last = torch.tanh(m.lin(x[:, t]))
            h = 0.5 * h + last
            out[:, t] = h
    finally:
        y = last
    return x + out + y[:, None]


def kept(box: list[Tensor], value: Tensor) -> bool:
    box.append(value)
    return True


@block(WHATEVER)
def written_where_it_is_kept(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    box: list[Tensor] = []
    h = torch.zeros_like(x[:, 0])
    out = torch.zeros_like(x)
    if kept(box, out):
        for t in range(x.shape[1]):
            h = torch.tanh(m.lin(x[:, t]) + 0.5 * h)
            out[:, t] = h
    return x + out + box[0] * 2


@block(WHATEVER)
def joined_along_an_axis(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = torch.zeros_like(x[:, 0])
    made = []
    for t in range(x.shape[1]):
        h = torch.tanh(m.lin(x[:, t]) + 0.5 * h)
        made.append(h)
    y = torch.stack(made, axis=1)  # type: ignore[call-overload]
    return x + y.mean(0).mean(0) + 0.1 * y[0].mean(0)


@block(WHATEVER)
def entries_that_change_after_it(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    y = x * 1.0
    h = torch.zeros_like(x[:, 0])
    made, out = [], torch.zeros_like(x)
    for t in range(x.shape[1]):
        h = torch.tanh(m.lin(x[:, t]) + 0.5 * h)
        made.append(y[:, t])
        out[:, t] = h
    y.mul_(2.0)
    return x + out + torch.stack(made, 1)


@block(WHATEVER)
def a_last_state_that_changes_after_it(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = torch.zeros_like(x[:, 0])
    made = []
    for t in range(x.shape[1]):
        h = m.lin(x[:, t]) + 0.5 * h
        made.append(h)
    h.mul_(2)
    return x + torch.stack(made, 1)


@block(WHATEVER)
def a_part_without_a_gradient(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = torch.zeros_like(x[:, 0])
    out = torch.zeros_like(x)
    for t in range(x.shape[1]):
        h = torch.tanh(m.lin(x[:, t]) + h * m.layer.gate(x[:, t]).detach())
        out[:, t] = h
    return x + out


@block(WHATEVER)
def all_without_a_gradient(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = torch.zeros_like(x[:, 0])
    out = torch.zeros_like(x)
    for t in range(x.shape[1]):
        h = torch.tanh(m.layer.gate(x[:, t]) + h).detach()
        out[:, t] = h
    return x + out


@block(WHATEVER)
def a_region_that_is_checkpointed(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = torch.zeros_like(x[:, 0])
    made = []
    for t in range(x.shape[1]):
        h = checkpoint(m.cell, x[:, t], h, use_reentrant=False)
        made.append(h)
    return x + torch.stack(made, 1)
