"""Changes in place: what is changed, by which op."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from e2e_adversary import REFUSED, WHATEVER, Cases
from e2e_subject import HEADS, WIDTH, Subject
from torch import Tensor

CASES = Cases("in place")


@CASES.block()
def plus_equals(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = m.lin(x)
    h += x
    h *= m.scale
    h -= 0.1
    h /= 1.5
    return h


@CASES.block()
def residual_in_place(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    y = m.lin(m.norm(x))
    z = x + y
    z += y
    return z


@CASES.block()
def clamp_(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = m.lin(x)
    h.clamp_(-0.3, 0.4)
    return x + h


@CASES.block(want=WHATEVER)
def clamp_without_grad(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = m.lin(x)
    with torch.no_grad():
        h.clamp_(-0.3, 0.4)
    return x + h


@CASES.block(want=WHATEVER)
def clamp_of_data(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = m.lin(x)
    h.data.clamp_(-0.3, 0.4)
    return x + h


@CASES.block()
def copy_(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = torch.zeros_like(x)
    h.copy_(m.lin(x))
    h[..., :3].copy_(x[..., 3:6])
    return x + h


@CASES.block(want=WHATEVER)
def copy_into_an_expanded_part(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = torch.empty_like(x)
    h.copy_(m.scale)
    h[..., 1:4] = m.lin(x)[..., :1]
    return x * h


@CASES.block()
def masked_fill_(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = m.lin(x)
    h.masked_fill_((ids % 3 == 0)[..., None], 0.0)
    return x + h


@CASES.block()
def masked_fill_through_heads(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = m.lin(x)
    h.view(*x.shape[:2], HEADS, -1)[:, :, 1].masked_fill_((ids > 9)[..., None], -0.5)
    return x + h


@CASES.block(want=WHATEVER)
def boolean_mask_setitem(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = m.lin(x)
    h[ids == 4] = 0.25
    return x + h


@CASES.block(want=WHATEVER)
def boolean_mask_of_values(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = m.lin(x)
    h[h < 0] = 0.0
    return x + h


@CASES.block(want=WHATEVER)
def setitem_of_one_row(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = m.lin(x)
    h[:, 0] = 0
    return x + h


@CASES.block(want=WHATEVER)
def setitem_of_the_last_row(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = m.lin(x)
    h[:, -1] = m.scale
    return x + h


@CASES.block(want=WHATEVER)
def setitem_of_all_but_the_first_row(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = m.lin(x)
    h[:, 1:] = h[:, 1:] + m.lin2(x)[:, :-1]
    return x + h


@CASES.block(want=WHATEVER)
def shift_by_setitem(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = torch.zeros_like(x)
    h[:, 1:] = x[:, :-1]
    return x + m.lin(h)


@CASES.block(want=WHATEVER)
def shift_ahead_by_setitem(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = torch.zeros_like(x)
    h[:, :-1] = x[:, 1:]
    return x + m.lin(h)


@CASES.block()
def setitem_of_channels(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = m.lin(x)
    h[..., 2:5] = x[..., :3]
    h[:, :, 7] = m.lin2(x)[:, :, 1]
    h[..., ::5] += 0.5
    h[..., -1] *= 2
    return x + h


@CASES.block(want=WHATEVER)
def setitem_of_listed_channels(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = m.lin(x)
    h[..., [0, 3, 5]] = x[..., [1, 1, 2]]
    return x + h


@CASES.block(want=WHATEVER)
def index_put_accumulates(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = m.lin(x)
    channels = torch.tensor([0, 3, 3])
    h.index_put_(
        (torch.zeros(1, dtype=torch.long), torch.ones(1, dtype=torch.long)), m.scale[None], accumulate=True
    )
    return (x + h).index_add(2, channels, x[..., :3])


@CASES.block(want=WHATEVER)
def index_add_rows(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = m.lin(x)
    h.index_add_(1, torch.tensor([1, 4, 4]), x[:, :3])
    return x + h


@CASES.block(want=WHATEVER)
def index_fill_and_copy(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = m.lin(x)
    h.index_fill_(2, torch.tensor([1, 2]), 0.3)
    h.index_copy_(2, torch.tensor([5, 0]), x[..., :2])
    return x + h


@CASES.block(want=WHATEVER)
def scatter_channels(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = m.lin(x)
    top = m.lin2(x).topk(3, -1)
    h.scatter_(2, top.indices, top.values)
    h.scatter_add_(2, top.indices, x[..., :3])
    return x + h


@CASES.block(want=WHATEVER)
def scatter_rows(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """Each row goes to the row that its token names: no row is causal."""
    h = m.lin(x)
    where = (ids % x.shape[1])[..., None].expand_as(x)
    return x + torch.zeros_like(x).scatter_add_(1, where, h)


@CASES.block()
def zero_of_a_part(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = m.lin(x)
    h[..., 3:5].zero_()
    h.narrow(2, 6, 2).fill_(0.7)
    return x + h


@CASES.block()
def activations_in_place(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = m.lin(x)
    h[..., 4:].sigmoid_()
    y = F.silu(m.lin2(x), inplace=True) + F.leaky_relu(m.lin(x), 0.2, inplace=True)
    return x + h + y + torch.tanh_(m.lin2(x)) + F.elu_(m.lin(x))


@CASES.block()
def relu_of_a_view(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = m.lin(x)
    F.relu(h.flatten(0, 1), inplace=True)
    return x + h


@CASES.block()
def relu_of_heads(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = m.lin(x)
    q = h.unflatten(-1, (HEADS, -1)).movedim(2, 1)
    F.relu_(q)
    return x + h


@CASES.block()
def dropout_in_place_of_nothing(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = m.lin(x)
    y = F.dropout(h, 0.0, True, inplace=True)
    y += 1
    return x + h


@CASES.block()
def out_of_place_then_in_place(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = m.lin(x)
    y = h.reshape(h.shape[0], -1)
    h = h + 1
    y.mul_(2)
    return x + h


@CASES.block()
def exchange_of_parts(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = m.lin(x)
    a, b = h[..., :6], h[..., 6:]
    kept = a.clone()
    a.copy_(b)
    b.copy_(kept * 2)
    return x + h


@CASES.block()
def rotation_in_place(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = m.lin(x)
    angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * 0.1
    first, second = h[..., 0::2].clone(), h[..., 1::2].clone()
    h[..., 0::2] = first * angle.cos() - second * angle.sin()
    h[..., 1::2] = first * angle.sin() + second * angle.cos()
    return x + h


@CASES.block()
def out_argument(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    with torch.no_grad():
        h = torch.empty_like(x)
        torch.mul(x, 2.0, out=h)
    return x + m.lin(x) * h


@CASES.block(want=WHATEVER)
def delta_rule(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """A gated delta rule over four rows at a time, as in plain PyTorch: `out[:, :, i] = ...`."""
    q, k, v = m.lin(x), m.lin2(x).softmax(-1), m.v(x)
    state = torch.zeros(x.shape[0], WIDTH, WIDTH, dtype=x.dtype)
    out = torch.zeros_like(v)
    for i in range(4):
        state = state * 0.9 + k[:, i, :, None] * v[:, i, None, :]
        out[:, i] = (q[:, i, None, :] @ state)[:, 0]
    return x + out


@CASES.block(want=WHATEVER)
def triangular_inverse_by_rows(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """The inner loop of chunked delta rules: rows of a small matrix are filled one after the other."""
    small = m.lin(x)[..., :9].unflatten(-1, (3, 3)).tril(-1)
    for i in range(1, 3):
        row = small[..., i, :i].clone()
        small[..., i, :i] = row + (row.unsqueeze(-1) * small[..., :i, :i].clone()).sum(-2)
    return x + F.pad(small.flatten(2), (0, 3))


@CASES.block()
def channels_filled_one_by_one(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h, out = m.lin(x), torch.zeros_like(x)
    for i in range(4):
        out[:, :, i] = h[:, :, i] * (out[:, :, i - 1].clone() if i else 1)
    return x + out


@CASES.block(want=WHATEVER)
def embedding_s_output_changed(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    x.mul_(WIDTH**0.5)
    return x + m.lin(x)


@CASES.block()
def a_constant_changed(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    weight = m.lin.weight * 1.0
    weight[0].zero_()
    weight.mT.mul_(2)
    return x + F.linear(x, weight)


@CASES.block()
def a_view_of_a_constant_changed(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    weight = m.lin.weight * 1.0
    part = weight.unflatten(0, (3, 4))
    weight += 1
    part[1].mul_(0.2)
    return x + F.linear(x, weight) + part.sum() * 0.01


@CASES.block()
def positions_changed(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    position = torch.arange(x.shape[1]).expand(x.shape[0], -1).clone()
    position += 3
    position.flatten()[:] = position.flatten() * 2
    return x + m.table[position % 100]


@CASES.block(want={"compile": WHATEVER, "transform": REFUSED})
def data_replaced(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h, y = m.lin(x), m.lin2(x)
    z = h.flatten(0, 1)
    h.data = y.data
    return x + h + z.view(x.shape)


@CASES.block(WHATEVER)
def foreach_in_place(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    a, b = m.lin(x), m.lin2(x)
    torch._foreach_mul_([a, b.flatten(0, 1)], 0.5)
    return x + a * b


@CASES.block()
def addcmul_and_lerp(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = m.lin(x)
    y = h.swapaxes(0, 1)
    y.addcmul_(x.swapaxes(0, 1), m.scale, value=0.3)
    h.lerp_(x, 0.25)
    return x + y.swapaxes(0, 1)


@CASES.block()
def matmul_in_place(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = m.lin(x)
    h.flatten(0, 1).addmm_(x.flatten(0, 1), m.lin2.weight, beta=0.5, alpha=-2.0)
    return x + h


@CASES.block(want=WHATEVER)
def batch_norm_by_hand_in_place(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = m.lin(x)
    with torch.no_grad():
        h.sub_(h.mean((0, 1)))
    return x + h


@CASES.block()
def parts_of_a_view_changed_in_turn(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = m.lin(x)
    y = h.unflatten(-1, (3, 4))
    a, b, c = y[:, :, 0], y[:, :, 1], y[:, :, 2]
    b.add_(a)
    c.add_(b)
    a.sub_(c)
    return x + h * m.scale


# ---- other names of the memory, of which autograd does not know


@CASES.block(WHATEVER)
def detached_name_given_a_gradient(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = m.lin(x)
    h.detach().copy_(m.lin2(x))
    return x + h * m.scale


@CASES.block(WHATEVER)
def part_of_a_detached_name(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = m.lin(x)
    h.detach()[..., :3].mul_(m.scale[:3])
    return x + h * m.scale


@CASES.block(WHATEVER)
def data_given_a_gradient(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = m.lin(x)
    h.data[..., 0] = m.lin2(x)[..., 1]
    return x + h * m.scale


@CASES.block(WHATEVER)
def zeros_given_a_gradient_by_another_name(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    z = torch.zeros_like(x.detach())
    y = z.detach()
    y.copy_(m.lin(x))
    return x + z * m.scale + y


@CASES.block(WHATEVER)
def weight_changed_by_a_detached_name(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    w = m.lin.weight * 1.0
    w.detach().mul_(m.scale)
    return x + F.linear(x, w)


@CASES.block()
def data_read_after_a_change(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = m.lin(x)
    v, w = h.data, h.detach().view(-1)
    h.mul_(0.5)
    return x + h.sin() + v * m.scale + w.view(x.shape) * m.scale
