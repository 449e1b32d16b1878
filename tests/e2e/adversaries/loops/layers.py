"""Recurrences of PyTorch: `scan`, and the layers of `torch.nn`."""

from __future__ import annotations

import torch
from e2e_adversary import REFUSED, WHATEVER
from e2e_subject import WIDTH, Subject
from torch import Tensor
from torch._higher_order_ops.scan import scan

from .parts import block


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
