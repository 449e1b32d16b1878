"""Loops of which the first row is another step than the others."""

from __future__ import annotations

import torch
from e2e_adversary import WHATEVER
from e2e_subject import Subject
from torch import Tensor
from torch.nn import functional as F

from .parts import block


@block()
def the_number_is_asked(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    made = []
    for t in range(x.shape[1]):
        if t == 0:
            h = torch.tanh(m.lin(x[:, 0]))
        else:
            h = torch.tanh(m.lin(x[:, t]) + m.lin2(h))
        made.append(h)
    made = torch.stack(made, 1)  # type: ignore[assignment]
    return x + made


@block()
def a_cell_without_a_state(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    made, state = [], None
    for row in x.unbind(1):
        state = m.long(row, state)
        made.append(state[0])
    return x + torch.stack(made, 1)


@block()
def some_states_begin(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    made, c, h = [], m.first.expand(x.shape[0], -1), None
    for t, row in enumerate(x.unbind(1)):
        h = torch.tanh(m.lin(h) + row) if t > 0 else m.lin2(row) + c
        c = 0.5 * c + h
        made.append(h * c if t else c)
    return x + torch.stack(made, 1)


@block()
def a_step_with_no_finite_gradient_for_the_first(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """Whoever computes both steps and chooses has a gradient of NaN."""
    made, h = [], None
    for t in range(x.shape[1]):
        if h is None:
            h = torch.tanh(x[:, t])
        else:
            h = torch.tanh(x[:, t] + 0.1 * m.lin(h) / h.abs().sqrt())
        made.append(h)
    return x + torch.stack(made, 1)


@block()
def two_steps_and_no_state(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for t in range(x.shape[1]):
        row = m.lin(x[:, t]) if not t else m.lin2(x[:, t])
        out[:, t] = row
    return x + out


@block()
def a_first_row_without_a_gradient(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    made, h = [], None
    for t in range(x.shape[1]):
        h = torch.zeros_like(x[:, t]) if h is None else torch.tanh(m.lin(h + 1) + x[:, t])
        made.append(h)
    return x + torch.stack(made, 1)


@block()
def a_second_row_that_is_other(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    made, h, before = [], None, None
    for t in range(x.shape[1]):
        new = x[:, t] if h is None else torch.tanh(m.lin(h)) + x[:, t]
        before, h = h, new
        made.append(h if before is None else h + m.lin2(before))
    return x + torch.stack(made, 1)


@block(WHATEVER)
def a_first_state_that_is_narrow(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    made, h = [], None
    for t in range(x.shape[1]):
        if h is None:
            h = torch.tanh(x[:, t]).mean(-1, keepdim=True)
        else:
            h = torch.tanh(x[:, t] + m.lin(x[:, t]) * h)
        made.append(h + x[:, t])
    return x + torch.stack(made, 1)


@block(WHATEVER)
def a_first_state_in_single_precision(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    made, h = [], None
    for t in range(x.shape[1]):
        h = torch.tanh(x[:, t]).float() if h is None else torch.tanh(x[:, t] + m.lin(h.double()))
        made.append(h.double())
    return x + torch.stack(made, 1)


@block(WHATEVER)
def a_state_that_grows(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    made, h = [], None
    for t in range(x.shape[1]):
        h = x[:, t : t + 1] if h is None else torch.cat([h, x[:, t : t + 1]], 1)
        made.append(h.mean(1))
    return x + torch.stack(made, 1)


@block(WHATEVER)
def a_first_row_with_an_effect(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    made, h = [], None
    m.counts.asked = 0
    for t in range(x.shape[1]):
        h = counted(m, x[:, t]) if h is None else torch.tanh(h + m.lin(x[:, t]))
        made.append(h)
    return x + torch.stack(made, 1) * m.counts.asked


def counted(m: Subject, row: Tensor) -> Tensor:
    return row * m.counts.next()


@block(WHATEVER)
def a_first_row_that_is_dropped(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    made, h = [], None
    for t in range(x.shape[1]):
        h = F.dropout(x[:, t], 0.0) if h is None else torch.tanh(h + m.lin(x[:, t]))
        made.append(h)
    return x + torch.stack(made, 1)


@block(WHATEVER)
def without_gradients(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    made, h = [], None
    with torch.no_grad():
        for t in range(x.shape[1]):
            h = m.cell(x[:, t], h)
            made.append(h)
    return x + torch.stack(made, 1)


@block(WHATEVER)
def the_last_state_of_one_that_began_as_none(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    made, h = [], None
    for t in range(x.shape[1]):
        h = m.cell(x[:, t], h)
        made.append(h)
    return x + torch.stack(made, 1) + h[:, None]  # type: ignore[index]


# The first row is traced before the scan, for its shapes: an effect must not hide from the scan by that.


@block(WHATEVER)
def an_effect_that_hides_itself(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    seen: list[int] = []
    out, h = torch.zeros_like(x), None
    a = b = c = d = e = f = g = torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        h, y = noted(seen, m.lin(x[:, t]), h)
        out[:, t] = g + x[:, t]
        a, b, c, d, e, f, g = y, a, b, c, d, e, f
    return x + out


def noted(seen: list[int], row: Tensor, h: Tensor | None) -> tuple[Tensor, Tensor]:
    if h is not None:
        return torch.tanh(h + row), row * 5
    if seen:
        return row, row * 3
    seen.append(1)
    return row, row * 2


@block(WHATEVER)
def an_effect_on_a_module_that_hides_itself(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    m.counts.asked = 0
    out, h = torch.zeros_like(x), None
    a = b = c = d = e = f = g = torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        h, y = noted_in(m, m.lin(x[:, t]), h)
        out[:, t] = g + x[:, t]
        a, b, c, d, e, f, g = y, a, b, c, d, e, f
    return x + out


def noted_in(m: Subject, row: Tensor, h: Tensor | None) -> tuple[Tensor, Tensor]:
    if h is not None:
        return torch.tanh(h + row), row * 5
    if m.counts.asked:
        return row, row * 3
    m.counts.asked = 1
    return row, row * 2
