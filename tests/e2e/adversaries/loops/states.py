"""Loops whose states lie in lists and dicts, or are changed in place."""

from __future__ import annotations

import torch
from e2e_adversary import WHATEVER
from e2e_subject import Subject
from torch import Tensor

from .parts import block


@block()
def layers_in_a_list(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    states, made = [torch.zeros_like(x[:, 0]) for _ in range(2)], []
    for t in range(x.shape[1]):
        y = x[:, t]
        for k, layer in enumerate((m.lin, m.lin2)):
            states[k] = torch.tanh(layer(y) + 0.5 * states[k])
            y = states[k]
        made.append(y)
    return x + torch.stack(made, 1)


@block()
def cells_in_a_list(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h, c, made = [torch.zeros_like(x[:, 0])] * 2, [torch.ones_like(x[:, 0])] * 2, []
    for t in range(x.shape[1]):
        y = x[:, t]
        for k in range(2):
            h[k], c[k] = m.long(y, (h[k], c[k]))
            y = h[k]
        made.append(y)
    return x + torch.stack(made, 1)


@block()
def a_list_that_is_made_anew(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    states, made = [torch.zeros_like(x[:, 0]) for _ in range(2)], []
    for t in range(x.shape[1]):
        y, new = x[:, t], []
        for layer, state in zip((m.lin, m.lin2), states, strict=True):
            y = torch.tanh(layer(y) + 0.5 * state)
            new.append(y)
        states = new
        made.append(y)
    return x + torch.stack(made, 1)


@block()
def entries_of_a_dict(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    state, made = {"sum": torch.zeros_like(x[:, 0]), "count": torch.zeros_like(x[:, 0])}, []
    for t in range(x.shape[1]):
        state["sum"] += m.lin(x[:, t])
        state["count"] = 0.9 * state["count"] + 1
        made.append(state["sum"] / state["count"])
    return x + torch.stack(made, 1)


@block()
def methods_that_change_it(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h, c = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0])
    out = torch.zeros_like(x)
    for t in range(x.shape[1]):
        h.mul_(0.5).add_(m.lin(x[:, t]), alpha=2.0)
        c[...] = 0.5 * c + h.tanh()
        out[:, t] = h + c
    return x + out


@block(WHATEVER)
def changed_after_it_was_appended(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h, made = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h.add_(m.lin(x[:, t]))
        made.append(h)
    return x + 0.1 * torch.stack(made, 1)


@block(WHATEVER)
def read_after_the_loop(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h, made = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h.mul_(0.5).add_(m.lin(x[:, t]))
        made.append(h.clone())
    return x + torch.stack(made, 1) + h[:, None]


@block(WHATEVER)
def a_change_that_reads_the_change(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h, out = torch.zeros_like(x[:, 0]), torch.zeros_like(x)
    for t in range(x.shape[1]):
        h.add_(m.lin(x[:, t])).mul_(torch.tanh(h.detach()))
        out[:, t] = h
    return x + out


@block(WHATEVER)
def one_list_by_two_names(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    states, made, first = [torch.zeros_like(x[:, 0]) for _ in range(2)], [], None
    for t in range(x.shape[1]):
        if first is None:
            first = states
        states[0] = torch.tanh(m.lin(x[:, t]) + 0.5 * states[0])
        made.append(first[0] + x[:, t])
    return x + torch.stack(made, 1)


@block(WHATEVER)
def a_list_of_somebody_else(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    states = [torch.zeros_like(x[:, 0])]
    return x + in_it(states, m.lin(x)) + states[0][:, None]


def in_it(states: list[Tensor], x: Tensor) -> Tensor:
    made = []
    for t in range(x.shape[1]):
        states[0] = torch.tanh(x[:, t] + 0.5 * states[0])
        made.append(states[0])
    return torch.stack(made, 1)


# What is handed on from name to name is read after more rows than a loop is compared for.


@block(WHATEVER)
def handed_on(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h, out = torch.zeros_like(x[:, 0]), torch.zeros_like(x)
    a = b = c = d = e = f = g = i = torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        h += m.lin(x[:, t])
        out[:, t] = i + x[:, t]
        a, b, c, d, e, f, g, i = h.view(h.shape), a, b, c, d, e, f, g
    return x + out


@block(WHATEVER)
def handed_on_and_changed_later(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = last = a = b = c = d = e = f = g = torch.zeros_like(x[:, 0])
    out = torch.zeros_like(x)
    for t in range(x.shape[1]):
        last += m.lin2(x[:, t])
        out[:, t] = g + last
        new = m.lin(x[:, t]) + 1.0
        last, h = h, new
        a, b, c, d, e, f, g = new, a, b, c, d, e, f
    return x + out


@block(WHATEVER)
def handed_on_in_a_list(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    states, out = [torch.zeros_like(x[:, 0])], torch.zeros_like(x)
    a = b = c = d = e = f = g = i = states[0] + 1
    for t in range(x.shape[1]):
        states[0] += m.lin(x[:, t])
        out[:, t] = i + x[:, t]
        a, b, c, d, e, f, g, i = states[0], a, b, c, d, e, f, g
    return x + out


@block(WHATEVER)
def a_list_that_is_handed_on(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    states, out = [torch.zeros_like(x[:, 0])], torch.zeros_like(x)
    a = b = c = d = e = f = g = [torch.ones_like(x[:, 0])]
    for t in range(x.shape[1]):
        states[0] = states[0] + m.lin(x[:, t])
        out[:, t] = g[0] + x[:, t]
        g, f, e, d, c, b = f, e, d, c, b, a
        a = states
    return x + out


@block(WHATEVER)
def read_by_an_old_name_and_handed_on(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h, out = torch.zeros_like(x[:, 0]), torch.zeros_like(x)
    a = b = c = d = e = f = g = torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        old = h
        h += m.lin(x[:, t])
        out[:, t] = g + x[:, t]
        a, b, c, d, e, f, g = torch.tanh(old), a, b, c, d, e, f
    return x + out


@block(WHATEVER)
def a_row_that_is_changed_and_handed_on(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    y, out = x * 1.0, torch.zeros_like(x)
    a = b = c = d = e = f = g = torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        row = y[:, t]
        out[:, t] = g + m.lin(x[:, t])
        a, b, c, d, e, f, g = row, a, b, c, d, e, f
        row += 1.0
    return x + out


@block(WHATEVER)
def known_by_another_name_at_the_beginning(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = m.lin(x).mean(1)
    a, out = h, torch.zeros_like(x)
    b = c = d = e = f = g = torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        h += m.lin(x[:, t])
        out[:, t] = g + x[:, t]
        b, c, d, e, f, g = a, b, c, d, e, f
        a = torch.tanh(x[:, t])
    return x + out
