"""Loops along the sequence: a step from row to row is streamed, and nothing else is taken for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from e2e_adversary import REFUSED, STREAMED, WHATEVER, Cases
from e2e_subject import WIDTH, Subject
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

CASES = Cases("loops")


class Remembers(nn.Module):
    """A cell that leaves something behind when it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.last: Tensor | None = None

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        self.last = torch.tanh(self.lin(x) + h)
        return self.last


class Layer(nn.Module):
    """A recurrence in a method of its own, as models have it."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.gate, self.value = nn.Linear(width, width), nn.Linear(width, width)

    def run(self, gate: Tensor, value: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if state is None:
            state = torch.zeros(gate[:, 0].shape, dtype=gate.dtype)
        out = torch.zeros_like(value)
        for t in range(value.shape[1]):
            state = gate[:, t] * state
            state = state + value[:, t]
            out[:, t] = state
        return out, state

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.gate(x).sigmoid(), self.value(x))[0]


def with_other_weights(layers: nn.GRU) -> nn.GRU:
    """Put another parameter in the place of one, so that the layers do not hear of it."""
    layers._parameters["weight_hh_l0"] = nn.Parameter(layers.weight_hh_l0.detach() * 2)
    return layers


def parts() -> dict[str, Any]:
    return {
        "cell": nn.GRUCell(WIDTH, WIDTH), "long": nn.LSTMCell(WIDTH, WIDTH), "layer": Layer(),
        "counts": Counts(), "first": nn.Parameter(torch.randn(WIDTH)), "remembers": Remembers(),
        "seen": torch.zeros(WIDTH),
        "decay": nn.Parameter(torch.rand(WIDTH)), "lstm": nn.LSTM(WIDTH, WIDTH, 2, batch_first=True),
        "gru": nn.GRU(WIDTH, WIDTH), "rnn": nn.RNN(WIDTH, WIDTH, nonlinearity="relu", bias=False),
        "turned": with_other_weights(nn.GRU(WIDTH, WIDTH, batch_first=True)),
        "narrow": nn.GRU(4, 4, batch_first=True),
        "both": nn.GRU(WIDTH, WIDTH // 2, bidirectional=True, batch_first=True),
        "small": nn.LSTM(WIDTH, WIDTH + 4, proj_size=WIDTH, batch_first=True),
    }  # fmt: skip


def block(want: Any = STREAMED, **more: Any) -> Callable[..., Any]:
    return CASES.block(want, parts=parts, **more)


# ---- steps


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


@block()
def a_scan_of_pytorch(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    def step(carried: Tensor, rows: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        row, gate = rows
        after = torch.tanh(m.lin(row) + gate * carried)
        return after, after * 2

    rows = x.transpose(0, 1), m.lin2(x).sigmoid().transpose(0, 1)
    return x + scan(step, x.new_zeros(x.shape[0], WIDTH), rows)[1].transpose(0, 1)


@block()
def layers_of_pytorch(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + m.lstm(x)[0]


@block()
def layers_with_the_rows_first(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    made, _ = m.gru(x.transpose(0, 1))
    return x + m.rnn(made)[0].transpose(0, 1)


@block()
def layers_with_a_trained_beginning(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    first = m.first.expand(2, x.shape[0], WIDTH).contiguous()
    made, _ = m.lstm(x, (first, first.tanh()))
    return x + made


@block()
def layers_with_weights_that_are_made(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    doubled = {"weight_hh_l0": m.gru.weight_hh_l0 * 2, "weight_ih_l0": m.gru.weight_ih_l0.tanh()}
    return x + torch.func.functional_call(m.gru, doubled, (x.transpose(0, 1),))[0].transpose(0, 1)


@block()
def layers_with_other_weights(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + m.turned(x)[0]


@block()
def layers_over_heads(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    y = x.view(*x.shape[:2], 3, 4).transpose(1, 2).flatten(0, 1)
    return x + m.narrow(y)[0].view(x.shape[0], 3, -1, 4).transpose(1, 2).flatten(2)


# ---- not steps, or not known to be


@block(WHATEVER)
def a_state_for_others(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    _, state = m.lstm(x)
    return x + m.lstm(x.tanh(), state)[0]


@block(WHATEVER)
def the_last_state_of_layers(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    made, (h, c) = m.lstm(x)
    return x + made + h[-1][:, None] + c.sum(0)[:, None].tanh()


@block(WHATEVER)
def the_last_state_alone(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + m.gru(x.transpose(0, 1))[1].transpose(0, 1)


@block(f"{WHATEVER}|{REFUSED}")
def layers_that_go_both_ways(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + m.both(x)[0]


@block(f"{WHATEVER}|{REFUSED}")
def layers_that_project(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + m.small(x)[0]


@block(WHATEVER)
def the_row_before(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for t in range(x.shape[1]):
        out[:, t] = m.lin(x[:, t - 1]) if t else m.lin(x[:, t])
    return x + out


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


class Counts(nn.Module):
    """Numbers that are others each time."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def next(self) -> int:
        self.asked += 1
        return self.asked


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


# ---- what an adversary found: other results without a word, in the first version


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
