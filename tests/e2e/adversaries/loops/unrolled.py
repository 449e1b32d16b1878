"""Loops that are no steps, or not known to be."""

from __future__ import annotations

import torch
from e2e_adversary import WHATEVER
from e2e_subject import WIDTH, Subject
from torch import Tensor
from torch._higher_order_ops.scan import scan
from torch.nn import functional as F

from .parts import block


@block(WHATEVER)
def the_row_before(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for t in range(x.shape[1]):
        out[:, t] = m.lin(x[:, t - 1]) if t else m.lin(x[:, t])
    return x + out


@block(WHATEVER)
def rows_of_a_list(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h, made = x.new_zeros(x.shape[0], WIDTH), []
    rows = list(x.transpose(0, 1))
    for row in rows[:3]:
        h = 0.5 * h + row
        made.append(h)
    return x + torch.stack(made, 1).sum(1, keepdim=True)


@block(WHATEVER)
def rows_of_different_lengths(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h, made = torch.zeros_like(x[:, 0]), []
    for row, other in zip(x.unbind(1), m.lin(x[:, :-1]).unbind(1), strict=False):
        h = 0.5 * h + row * other
        made.append(h)
    return x + F.pad(torch.stack(made, dim=1), (0, 0, 0, 1))


@block(WHATEVER)
def from_the_end(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = x.new_zeros(x.shape[0], WIDTH)
    out = torch.zeros_like(x)
    for t in range(x.shape[1] - 1, -1, -1):
        h = 0.5 * h + x[:, t]
        out[:, t] = h
    return x + out


@block(WHATEVER)
def a_scan_from_the_end(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    def step(carried: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        after = torch.tanh(m.lin(row) + 0.5 * carried)
        return after, after * 2

    made = scan(step, x.new_zeros(x.shape[0], WIDTH), x.transpose(0, 1), reverse=True)[1]
    return x + made.transpose(0, 1)


@block(WHATEVER)
def what_it_has_written(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for t in range(x.shape[1]):
        out[:, t] = 0.5 * out.sum(1) + x[:, t]
    return x + out * 0.1


@block(WHATEVER)
def what_it_has_written_by_another_name(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    same = out
    for t in range(x.shape[1]):
        out[:, t] = 0.5 * same.mean(1) + x[:, t]
    return x + out


@block(WHATEVER)
def over_what_it_reads(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    y = x * 1.0
    z = y
    for t in range(x.shape[1]):
        y[:, t] = 0.5 * z.mean(1) + m.lin(x[:, t])
    return x + y


@block(WHATEVER)
def the_number_of_the_row(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = x.new_zeros(x.shape[0], WIDTH)
    out = torch.zeros_like(x)
    for t in range(x.shape[1]):
        h = h / (t + 1) + x[:, t]
        out[:, t] = h
    return x + out


@block(WHATEVER)
def every_other_row(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = x.new_zeros(x.shape[0], WIDTH)
    out = torch.zeros_like(x)
    for t in range(x.shape[1]):
        h = 0.5 * h + x[:, t]
        if t % 2:
            out[:, t] = h
    return x + out


@block(WHATEVER)
def all_but_the_last_row(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = x.new_zeros(x.shape[0], WIDTH)
    out = torch.zeros_like(x)
    for t in range(x.shape[1] - 1):
        h = 0.5 * h + x[:, t]
        out[:, t] = h
    return x + out


@block(WHATEVER)
def dropped_at_random(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = x.new_zeros(x.shape[0], WIDTH)
    out = torch.zeros_like(x)
    for t in range(x.shape[1]):
        h = F.dropout(0.5 * h + x[:, t], 0.0)
        out[:, t] = h
    return x + out


@block(WHATEVER)
def a_cell_that_remembers(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = x.new_zeros(x.shape[0], WIDTH)
    out = torch.zeros_like(x)
    for t in range(x.shape[1]):
        h = m.remembers(x[:, t], h)
        out[:, t] = h
    return x + out + m.remembers.last[:, None]


@block(WHATEVER)
def a_buffer_that_changes(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = x.new_zeros(x.shape[0], WIDTH)
    out = torch.zeros_like(x)
    for t in range(x.shape[1]):
        m.seen.mul_(0.5).add_(x[:, t].detach().mean(0))
        h = 0.5 * h + x[:, t] + m.seen
        out[:, t] = h
    return x + out


@block(WHATEVER)
def a_state_that_changes_in_place(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = x.new_zeros(x.shape[0], WIDTH)
    out = torch.zeros_like(x)
    for t in range(x.shape[1]):
        h *= 0.5
        h += x[:, t]
        out[:, t] = h
    return x + out


@block(WHATEVER)
def a_list_of_what_changes_in_place(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """All entries of the list are the same tensor: the last state."""
    h = x.new_zeros(x.shape[0], WIDTH)
    made = []
    for t in range(x.shape[1]):
        h += x[:, t]
        made.append(h)
    return x + 0.1 * torch.stack(made, 1)


@block(WHATEVER)
def the_last_state(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    out, last = m.layer.run(m.layer.gate(x).sigmoid(), m.layer.value(x))
    return x + out + last[:, None]


@block(WHATEVER)
def the_last_row_by_name(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = x.new_zeros(x.shape[0], WIDTH)
    out = torch.zeros_like(x)
    for t in range(x.shape[1]):
        row = m.lin(x[:, t])
        h = 0.5 * h + row
        out[:, t] = h
    return x + out + row[:, None]


@block(WHATEVER)
def a_state_as_long_as_the_sequence(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = x.new_zeros(x.shape[0], x.shape[1])
    out = torch.zeros_like(x)
    for t in range(x.shape[1]):
        h = 0.5 * h + x[:, t, :1]
        out[:, t] = h.mean(-1, keepdim=True) + x[:, t]
    return x + out


@block(WHATEVER)
def all_rows_at_each(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = x.new_zeros(x.shape[0], WIDTH)
    out = torch.zeros_like(x)
    for t in range(x.shape[1]):
        h = 0.5 * h + x[:, t] * x.mean(1)
        out[:, t] = h
    return x + out


@block(WHATEVER)
def a_number_that_is_carried(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h, scale = x.new_zeros(x.shape[0], WIDTH), 1.0
    out = torch.zeros_like(x)
    for t in range(x.shape[1]):
        scale = scale * 0.9
        h = h * 0.5 + x[:, t] * scale
        out[:, t] = h
    return x + out


@block(WHATEVER)
def none_to_begin_with(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = None
    out = torch.zeros_like(x)
    for t in range(x.shape[1]):
        h = x[:, t] if h is None else 0.5 * h + x[:, t]
        out[:, t] = h
    return x + out


@block(WHATEVER)
def over_heads(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    parts = x.view(*x.shape[:2], 3, 4)
    h = parts.new_zeros(*x.shape[:2], 4)
    out = torch.zeros_like(parts)
    for k in range(parts.shape[2]):
        h = 0.5 * h + parts[:, :, k]
        out[:, :, k] = h
    return x + out.flatten(2)


@block(WHATEVER)
def over_the_batch(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for k in range(x.shape[0]):
        out[k] = m.lin(x[k]).tanh()
    return x + out


@block(WHATEVER)
def rows_within_a_loop_over_layers(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    for linear in (m.lin, m.lin2):
        h = x.new_zeros(x.shape[0], WIDTH)
        out = torch.zeros_like(x)
        for t in range(x.shape[1]):
            h = torch.tanh(linear(x[:, t]) + 0.5 * h)
            out[:, t] = h
        x = x + out
    return x


@block(WHATEVER)
def a_function_that_knows_of_the_state(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = x.new_zeros(x.shape[0], WIDTH)
    out = torch.zeros_like(x)
    step = lambda row: 0.5 * h + row  # noqa: E731
    for t in range(x.shape[1]):
        h = step(x[:, t])
        out[:, t] = h
    return x + out


@block(WHATEVER)
def another_dtype_after_a_row(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = torch.zeros(x.shape[0], WIDTH, dtype=torch.float32)
    out = torch.zeros_like(x)
    for t in range(x.shape[1]):
        h = 0.5 * h + x[:, t]
        out[:, t] = h
    return x + out
