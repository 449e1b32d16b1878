"""Loops that are a step from row to row: they are streamed."""

from __future__ import annotations

import torch
from e2e_subject import WIDTH, Subject
from torch import Tensor

from .parts import block


@block()
def gates_and_an_output(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + m.layer(x)


@block()
def a_cell_and_a_list(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = x.new_zeros(x.shape[0], WIDTH)
    made = []
    for t in range(x.size(1)):
        h = m.cell(x[:, t], h)
        made.append(h)
    return x + torch.stack(made, dim=1)


@block()
def two_states_in_a_tuple(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    state = (torch.zeros_like(x[:, 0]), torch.ones_like(x[:, 0]))
    made = []
    for t in range(x.shape[1]):
        state = m.long(x[:, t, :], state)
        made.append(state[0] + state[1].tanh())
    return x + torch.stack(made, 1)


@block()
def slices_that_are_joined(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h, made = torch.zeros(x.shape[0], 1, WIDTH, dtype=x.dtype), []
    for t in range(x.shape[1]):
        h = torch.tanh(m.lin(x[:, t : t + 1]) + h * 0.5)
        made.append(h)
    return x + torch.cat(made, dim=-2)


@block()
def a_trained_beginning(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = m.first.expand(x.shape[0], -1)
    out = torch.empty_like(x)
    for t in range(x.shape[1]):
        h = torch.tanh(m.lin(x[:, t]) + h * m.decay)
        out[:, t, :] = h
    return x + out


@block()
def rows_first(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    turned = m.lin(x).transpose(0, 1)
    h = turned.new_zeros(turned.shape[1:])
    out = torch.zeros_like(turned)
    for t in range(turned.shape[0]):
        h = 0.9 * h + turned[t]
        out[t] = h
    return x + out.transpose(0, 1)


@block()
def rows_last(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    turned = m.lin(x).transpose(1, 2)
    h = turned.new_zeros(turned.shape[:2])
    out = torch.zeros_like(turned)
    for t in range(turned.shape[-1]):
        h = 0.9 * h + turned[..., t]
        out[..., t] = h
    return x + out.transpose(1, 2)


@block()
def several_results(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = x.new_zeros(x.shape[0], WIDTH)
    norms = []
    out = torch.zeros_like(x)
    sums = torch.zeros(x.shape[0], x.shape[1], dtype=x.dtype)
    for t in range(x.shape[1]):
        h = torch.tanh(m.lin(x[:, t]) + 0.5 * h)
        out[:, t] = h
        sums[:, t] = h.sum(-1)
        norms.append(h.square().mean(-1, keepdim=True))
    return x + out * sums[..., None] + torch.stack(norms, 1)


@block()
def a_matrix_for_a_state(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    q, k, v = m.lin(x), m.lin2(x).sigmoid(), m.v(x)
    state = x.new_zeros(x.shape[0], WIDTH, WIDTH)
    made = []
    for t in range(x.shape[1]):
        state = state * 0.9 + outer(k[:, t], v[:, t])
        made.append((q[:, t].unsqueeze(1) @ state).squeeze(1))
    return x + torch.stack(made, 1) / WIDTH


def outer(a: Tensor, b: Tensor) -> Tensor:
    return a.unsqueeze(-1) * b.unsqueeze(-2)


@block()
def rows_that_are_unbound(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = x.new_zeros(x.shape[0], WIDTH)
    made = []
    for row in x.unbind(1):
        h = m.cell(row, h)
        made.append(h)
    return x + torch.stack(made, 1)


@block()
def numbered_rows(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h, gate = x.new_zeros(x.shape[0], WIDTH), m.lin(x).sigmoid()
    made = []
    for t, row in enumerate(x.unbind(dim=1)):
        h = gate[:, t] * h + row
        made.append(h)
    return x + torch.stack(made, dim=1)


@block()
def a_choice_that_does_not_change(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = x.new_zeros(x.shape[0], WIDTH)
    out = torch.zeros_like(x)
    for t in range(x.shape[1]):
        row = m.lin(x[:, t])
        if m.before:
            row = row * 0.5
        else:
            h = h * 0.9
        h = h + row.tanh()
        out[:, t] = h
    return x + out


@block()
def without_a_state(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for t in range(x.shape[1]):
        out[:, t] = m.lin(x[:, t]).tanh()
    return x + out


@block()
def two_loops_with_the_same_names(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = x.new_zeros(x.shape[0], WIDTH)
    out = torch.zeros_like(x)
    for t in range(x.shape[1]):
        h = 0.5 * h + x[:, t]
        out[:, t] = h
    x = x + out
    h = x.new_zeros(x.shape[0], WIDTH)
    out = torch.zeros_like(x)
    for t in range(x.shape[1]):
        h = torch.tanh(m.lin(x[:, t]) + h)
        out[:, t] = h
    return x + out


@block()
def an_assignment_in_place_of_its_own(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = x.new_zeros(x.shape[0], WIDTH)
    out = torch.zeros_like(x)
    for t in range(x.shape[1]):
        scale = 0.5
        scale *= 0.5
        h = scale * h + x[:, t]
        out[:, t] = h
    return x + out


@block()
def rows_of_what_is_turned(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h, made, turned = x.new_zeros(x.shape[0], WIDTH), [], m.lin(x).permute(1, 0, 2)
    for row in x.transpose(0, 1):
        h = m.cell(row, h)
        made.append(h)
    x = x + torch.stack(made, 1)
    h, more = torch.zeros_like(h), []
    for _, row in enumerate(turned):
        h = 0.5 * h + row
        more += [h]
    return x + torch.stack(more).transpose(0, 1)


@block()
def rows_of_several_side_by_side(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    gate, value = m.lin(x).sigmoid(), m.lin2(x)
    h, made = torch.zeros_like(x[:, 0]), []
    for g, v in zip(gate.unbind(1), torch.unbind(value, dim=1), strict=True):
        h = g * h + (1 - g) * v
        made.append(h)
    return x + torch.stack(made, dim=1)


@block()
def rows_that_are_split(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h, made = x.new_zeros(x.shape[0], 1, WIDTH), []
    for row in x.split(1, dim=1):
        h = torch.tanh(m.lin(row) + h)
        made.append(h)
    return x + torch.cat(made, 1)


@block()
def a_state_that_is_added_to(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    q, k, v = m.lin(x), m.lin2(x).sigmoid(), m.v(x)
    state, made = x.new_zeros(x.shape[0], WIDTH, WIDTH), []
    for t in range(x.shape[1]):
        state = state * 0.9
        state += k[:, t, :, None] * v[:, t, None, :]
        made.append((q[:, t, None] @ state).squeeze(1))
    return x + torch.stack(made, 1) / WIDTH


@block()
def rows_that_there_may_not_be(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + masked(m.lin(x), None) + masked(m.lin2(x), x.sum(-1) > 0)


def masked(x: Tensor, mask: Tensor | None) -> Tensor:
    h, made = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        new = (0.5 * h + x[:, t]).tanh()
        if mask is not None:
            new = torch.where(mask[:, t, None], new, h)
        h = new
        made.append(h)
    return torch.stack(made, 1)


@block()
def layers_within_a_row(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h, made = x.new_zeros(x.shape[0], WIDTH), []
    for t in range(x.shape[1]):
        row = x[:, t]
        for layer in (m.lin, m.lin2):
            row = layer(row).tanh()
        h = 0.5 * h + row
        made.append(h)
    return x + torch.stack(made, 1)
