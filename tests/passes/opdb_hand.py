"""Calls by hand: ops, overloads and forms that PyTorch's database of samples does not reach."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from opdb_cases import by_hand
from torch import Tensor

from streambp_fx.passes.graph.ops.causal_convolution import CAUSAL_CONV1D
from streambp_fx.passes.graph.ops.recurrence import RECURRENCE, RECURRENCES, Recurrence
from streambp_fx.passes.rules.pointwise import tagged_ops

aten = torch.ops.aten
Sample = tuple[Any, tuple, dict[str, Any]]
L = 5  # the length, where a sample has one of its own


def floats(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def ints(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape)


def _by_schema(op: Any, whole_numbers: bool) -> tuple[tuple, dict[str, Any]]:
    """Arguments for an elementwise op: the second tensor has a row for each of the first, numbers are 2."""
    args: list[Any] = []
    for argument in op._schema.arguments:
        if argument.has_default_value() or argument.kwarg_only:
            break
        shape = (L, 1) if any(isinstance(v, Tensor) for v in args) else (3, L, 4)
        drawn = ints(5, *shape) + 1 if whole_numbers else floats(*shape).sigmoid()
        args.append(drawn if str(argument.type) == "Tensor" else 2)
    required = [a for a in op._schema.arguments if a.kwarg_only and not a.has_default_value()]
    return tuple(args), {a.name: 2 for a in required}


@by_hand
def tagged_as_elementwise() -> Iterator[Sample]:
    """One sample of each op that has its rule because PyTorch tags it."""
    for op in tagged_ops():
        for whole_numbers in (False, True):
            args, kwargs = _by_schema(op, whole_numbers)
            try:
                op(*args, **kwargs)
            except (RuntimeError, NotImplementedError):
                continue
            yield op, args, kwargs
            break


@by_hand
def convolutions() -> Iterator[Sample]:
    """Along the last dim, of channels by themselves, in groups and together."""
    for weight, bias, dilation, groups in (
        (floats(4, 1, 3), None, 1, 4), (floats(6, 2, 2), floats(6), 2, 2), (floats(3, 4, 1), None, 1, 1),
    ):  # fmt: skip
        yield CAUSAL_CONV1D, (floats(2, 4, L), weight, bias, dilation, groups), {}


def _scan(operands: Any, settings: Any, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """state = a * state + b, row by row, times a weight of each column."""
    a, b, weight = operands
    made = []
    state = torch.zeros_like(b[:, 0]) if state is None else state
    for k in range(b.shape[1]):
        state = a[:, k] * state + b[:, k] * settings[0]
        made.append(state if weight is None else state * weight)
    return torch.stack(made, 1), state


SCAN = Recurrence("tests.scan", _scan, dims=(1, 1, None), rows=1, like=1, state=((1, 0), (1, 2)))
RECURRENCES[SCAN.name] = SCAN


@by_hand
def recurrences() -> Iterator[Sample]:
    for weight in (floats(4), None):
        yield RECURRENCE, (SCAN.name, [floats(2, L, 4), floats(2, L, 4), weight], [0.5], None), {}


@by_hand
def scalars() -> Iterator[Sample]:
    x = floats(3, L, 4)
    for name in ("add", "sub", "mul", "div", "remainder", "fmod", "rsub", "eq", "ne", "lt", "le", "gt", "ge"):
        yield getattr(aten, name).Scalar, (x, 0.7), {}
    yield aten.add.Scalar, (x, 2, -0.5), {}
    yield aten.sub.Scalar, (x, 2, -0.5), {}
    yield aten.rsub.Scalar, (x, 2, -0.5), {}
    for mode in (None, "floor", "trunc"):
        yield aten.div.Scalar_mode, (x, 0.3), {"rounding_mode": mode}
        yield aten.div.Tensor_mode, (x, floats(L, 1) + 3), {"rounding_mode": mode}
    yield aten.pow.Scalar, (1.5, x), {}
    yield aten.pow.Tensor_Scalar, (x.abs(), 0.5), {}
    yield aten.pow.Tensor_Scalar, (x, 3), {}
    yield aten.lerp.Scalar, (x, floats(L, 4), 0.3), {}
    yield aten.lerp.Tensor, (x, floats(L, 4), floats(L, 1)), {}
    yield aten.addcmul.default, (x, floats(L, 1), floats(3, 1, 4)), {"value": -0.5}
    yield aten.addcdiv.default, (x, floats(L, 1), floats(4) + 3), {"value": -0.5}
    yield aten.add.Tensor, (x, floats(L, 4)), {"alpha": -2}
    yield aten.add.Tensor, (x, torch.tensor(2.0)), {"alpha": 0}
    yield aten.sub.Tensor, (x, floats(L, 1)), {"alpha": 0.5}
    yield aten.rsub.Tensor, (x, floats(L, 1)), {"alpha": 0.5}
    yield aten.add.Tensor, (floats(L), floats(3, 1)), {}


@by_hand
def diagonals() -> Iterator[Sample]:
    yield aten.diagonal.default, (floats(3, L, 4, 3), 0, 2, 3), {}
    yield aten.diagonal.default, (floats(4, 3, L, 4), 1, 0, -1), {}
    yield aten.diagonal.default, (floats(3, L, 4), 0, 0, 2), {}
    yield aten.diagonal_scatter.default, (floats(3, L, 4, 3), floats(3, L, 3), 0, 2, 3), {}
    yield aten.diagonal_scatter.default, (floats(4, 3, L, 4), floats(3, L, 3), 1, 0, -1), {}


@by_hand
def limits() -> Iterator[Sample]:
    x = floats(3, L, 4)
    yield aten.clamp.default, (x, -0.5), {}
    yield aten.clamp.default, (x,), {"max": 0.5}
    yield aten.clamp.default, (x, -0.1, 0.5), {}
    yield aten.clamp_min.default, (x, 0.1), {}
    yield aten.clamp_max.default, (x, 0.1), {}
    yield aten.clamp.Tensor, (x, floats(L, 1)), {}
    yield aten.clamp.Tensor, (x,), {"max": floats(L, 4)}
    yield aten.clamp.Tensor, (x, floats(3, 1, 1) - 2, floats(L, 4) + 2), {}
    condition = floats(L, 4) > 0
    yield aten.where.self, (condition, x, floats(4)), {}
    yield aten.where.self, (torch.tensor(True), x, floats(L, 1)), {}
    yield aten.where.ScalarOther, (condition, x, 0.5), {}
    yield aten.where.ScalarSelf, (condition, 0.5, x), {}
    yield aten.where.Scalar, (condition, 0.5, -1), {}
    yield aten.masked_fill.Scalar, (x, condition, float("-inf")), {}
    yield aten.masked_fill.Scalar, (floats(L, 4), floats(3, L, 1) > 0, 1), {}
    yield aten.masked_fill.Tensor, (x, condition, torch.tensor(0.5, dtype=torch.float64)), {}
    yield aten.threshold.default, (x, 0.1, -3), {}
    yield aten.hardtanh.default, (x, -0.3, 0.4), {}
    yield aten.nan_to_num.default, (x.log(), 1.0, 2.0, 3.0), {}
    yield aten.gelu.default, (x,), {"approximate": "tanh"}
    yield aten.softplus.default, (x, 2.0, 0.5), {}
    yield aten.elu.default, (x, 0.5, 1.2, 0.7), {}
    yield aten.celu.default, (x, 0.5), {}
    yield aten.leaky_relu.default, (x, 0.3), {}
    yield aten.logit.default, (x.sigmoid(), 0.1), {}


@by_hand
def bits() -> Iterator[Sample]:
    x, y = floats(3, L, 4) > 0, floats(L, 1) > 0
    for name in ("__and__", "__or__", "__xor__", "bitwise_and", "bitwise_or", "bitwise_xor"):
        yield getattr(aten, name).Tensor, (x, y), {}
        yield getattr(aten, name).Tensor, (ints(9, 3, L), ints(9, L)), {}


@by_hand
def casts() -> Iterator[Sample]:
    x, other = floats(3, L, 4), torch.zeros(3, L, 4, dtype=torch.float32)
    yield aten.alias.default, (x,), {}
    yield aten.contiguous.default, (x,), {}
    yield aten.clone.default, (x,), {"memory_format": torch.contiguous_format}
    yield aten.lift_fresh.default, (x,), {}
    yield aten.detach.default, (x,), {}
    for target in (torch.float32, torch.float64):
        yield aten.to.dtype, (x, target), {}
        yield aten._to_copy.default, (x,), {"dtype": target}
        yield aten.to.dtype_layout, (x,), {"dtype": target, "layout": torch.strided}
        yield aten.to.device, (x, torch.device("cpu"), target), {}
    yield aten.to.dtype, (x, torch.int64), {}
    for lender in (other, other[0], other[:, :, :1], ints(4, L, 4), torch.zeros(2, L, 3, 4), torch.zeros(())):
        yield aten.type_as.default, (x, lender), {}
        yield aten.to.other, (x, lender), {}
        yield aten.type_as.default, (floats(L), lender), {}
    yield aten.zeros_like.default, (x,), {"dtype": torch.float32}
    yield aten.full_like.default, (x, 3), {}


@by_hand
def reductions() -> Iterator[Sample]:
    x = floats(3, L, 4, 2)
    for dims in ([-1], [0], [2, -1], [-4, 3], [0, 2, 3], [], None, [1]):
        for keep in (False, True):
            for op in (aten.mean.dim, aten.sum.dim_IntList, aten.var.correction, aten.std.correction):
                yield op, (x, dims), {"keepdim": keep}
            yield aten.var.dim, (x, dims, False, keep), {}
            yield aten.std.dim, (x, dims, False, keep), {}
            yield aten.var.dim, (x, dims, True, keep), {}
            yield aten.std.dim, (x, dims), {"keepdim": keep}
            if dims is not None:
                yield aten.amax.default, (x, dims, keep), {}
                yield aten.amin.default, (x, dims, keep), {}
                yield aten.logsumexp.default, (x, dims, keep), {}
                yield aten.norm.ScalarOpt_dim, (x, 3, dims, keep), {}
            yield aten.linalg_vector_norm.default, (x, 1, dims, keep), {}
            yield aten.linalg_vector_norm.default, (x,), {"ord": float("inf"), "dim": dims, "keepdim": keep}
    for dim in (-1, 0, 2):
        for keep in (False, True):
            for op in (aten.prod.dim_int, aten.max.dim, aten.min.dim):
                yield op, (x, dim, keep), {}
            for op in (aten.argmax.default, aten.argmin.default):
                yield op, (x, dim, keep), {}
                yield op, (x,), {"dim": dim, "keepdim": keep}
            yield aten.any.dim, (x > 0, dim, keep), {}
            yield aten.all.dim, (x > 0, dim, keep), {}
    yield aten.argmax.default, (x,), {}
    yield aten.amax.default, (x,), {}
    yield aten.var.correction, (x, [-1]), {"correction": 0}
    yield aten.std.correction, (x, [-1]), {"correction": 2}
    yield aten.sum.dim_IntList, (x, [-1]), {"dtype": torch.float32}
    yield aten.mean.dim, (ints(5, 3, L, 4), [-1]), {"dtype": torch.float64}
    yield aten.prod.dim_int, (x, -1), {"dtype": torch.float32}
    yield aten.linalg_vector_norm.default, (x.float(), 2, [-1]), {"dtype": torch.float64}
    yield aten.norm.ScalarOpt_dim, (x, None, [-1]), {}


@by_hand
def normalisations() -> Iterator[Sample]:
    x = floats(3, L, 4)
    for op in (aten.softmax.int, aten.log_softmax.int):
        for dim in (-1, 0, 1):
            yield op, (x, dim), {}
        yield op, (x, -1, torch.float32), {}
    for op in (aten._softmax.default, aten._log_softmax.default):
        yield op, (x, -1, False), {}
        yield op, (x, -3, False), {}
    unseen = x.masked_fill(torch.arange(L)[:, None] < 2, -torch.inf)  # rows of minus infinity alone
    for dim in (-1, 0):
        yield aten._safe_softmax.default, (x, dim), {}
        yield aten._safe_softmax.default, (unseen, dim), {}
    yield aten.layer_norm.default, (x, [4]), {}
    yield aten.layer_norm.default, (x, [4], floats(4)), {}
    yield aten.layer_norm.default, (x, [4], None, floats(4), 0.1), {}
    yield aten.layer_norm.default, (x.transpose(0, 1), [3, 4], floats(3, 4), floats(3, 4)), {}
    yield aten.layer_norm.default, (x, [L, 4], floats(L, 4)), {}
    yield aten.rms_norm.default, (x, [4], floats(4), 1e-3), {}
    yield aten.rms_norm.default, (x, [4]), {}
    for op in (aten.cumsum.default, aten.cumprod.default):
        yield op, (x, -1), {}
        yield op, (x, 0), {"dtype": torch.float32}
    for descending in (False, True):
        yield aten.sort.default, (x, -1, descending), {}
        yield aten.argsort.default, (x, 0, descending), {}
    yield aten.sort.default, (x,), {}
    yield aten.argsort.default, (x,), {}
    yield aten.topk.default, (x, 2), {}
    yield aten.topk.default, (x, 2, 0, False, True), {}
    yield aten.topk.default, (x, 1, -1), {"largest": False}


@by_hand
def losses() -> Iterator[Sample]:
    x, y = floats(3, L, 4), floats(3, L, 4)
    p = y.sigmoid()
    none = {"reduction": 0}
    yield aten.mse_loss.default, (x, y, 0), {}
    yield aten.l1_loss.default, (x, y), none
    yield aten.smooth_l1_loss.default, (x, y, 0, 0.5), {}
    yield aten.huber_loss.default, (x, y, 0, 0.5), {}
    yield aten.soft_margin_loss.default, (x, y.sign()), none
    yield aten.poisson_nll_loss.default, (x, p, True, True, 1e-8, 0), {}
    yield aten.poisson_nll_loss.default, (p, p, False, False, 1e-8, 0), {}
    yield aten.kl_div.default, (x, p), none
    yield aten.kl_div.default, (x, y, 0), {"log_target": True}
    yield aten.binary_cross_entropy.default, (x.sigmoid(), p, None, 0), {}
    yield aten.binary_cross_entropy.default, (x.sigmoid(), p, p[0], 0), {}
    yield aten.binary_cross_entropy_with_logits.default, (x, p, None, None, 0), {}
    yield aten.binary_cross_entropy_with_logits.default, (x, p, p[0], p[0, 0], 0), {}
    yield aten.mse_loss.default, (x, y[0]), {"reduction": 0}
    yield aten.mse_loss.default, (x, y), {}
    yield aten.mse_loss.default, (x, y[0, :, :1], 2), {}


@by_hand
def cross_entropies() -> Iterator[Sample]:
    op = aten.cross_entropy_loss.default
    weight = floats(6).abs()
    for ignored in (-100, 0):
        for smoothing in (0.0, 0.2):
            for given in (None, weight):
                yield op, (floats(L, 6), ints(6, L), given, 0, ignored, smoothing), {}
                yield op, (floats(3, 6, L), ints(6, 3, L), given, 0, ignored, smoothing), {}
                yield op, (floats(3, 6, L, 2), ints(6, 3, L, 2)), {
                    "weight": given, "reduction": 0, "ignore_index": ignored, "label_smoothing": smoothing,
                }  # fmt: skip
    for shape in ((L, 6), (3, 6, L), (3, 6, 2, L)):
        yield op, (floats(*shape), floats(*shape).softmax(1), weight, 0), {}
        yield op, (floats(*shape), floats(*shape).softmax(1)), {"reduction": 0, "label_smoothing": 0.1}
    yield op, (floats(6), torch.tensor(2)), {}
    yield op, (floats(2 * L, 6), ints(6, 2 * L), None, 0), {}


@by_hand
def products() -> Iterator[Sample]:
    x = floats(3, L, 4)
    yield aten.linear.default, (x, floats(2, 4)), {}
    yield aten.linear.default, (x, floats(2, 4), floats(2)), {}
    yield aten.linear.default, (x, floats(2, 4)), {"bias": floats(2)}
    yield aten.linear.default, (x, floats(4)), {}
    yield aten.linear.default, (x[0], floats(2, 4), floats(2)), {}
    yield aten.linear.default, (floats(3, 2, L, 4), floats(2, 4), None), {}
    yield aten.addmm.default, (floats(2), x[0], floats(4, 2)), {"beta": 0.5, "alpha": -2}
    yield aten.addmm.default, (floats(1, 2), x[0], floats(4, 2)), {}
    yield aten.addmm.default, (floats(L, 2), x[0], floats(4, 2)), {}
    for shape in ((3, L, L), (L, L), (L,), (1, L), (L, 1), (3, 1, 1)):
        yield aten.baddbmm.default, (floats(*shape), x, floats(3, 4, L)), {"beta": 0.5, "alpha": 0.3}
    yield aten.baddbmm.default, (floats(3, L, 2), x, floats(3, 4, 2)), {}
    yield aten.bmm.default, (x, floats(3, 4, L)), {}
    yield aten.mm.default, (x[0], floats(4, L)), {}
    yield aten.matmul.default, (floats(3, 2, L, 4), floats(3, 1, 4, L)), {}
    yield aten.matmul.default, (floats(3, 2, L, L), floats(3, 2, L, 4)), {}
    yield aten.matmul.default, (floats(L, L), floats(L, 4)), {}
    yield aten.matmul.default, (x, floats(4, 2)), {}
    yield aten.matmul.default, (floats(2, 4), floats(4, L)), {}
    yield aten.matmul.default, (x, floats(4)), {}
    yield aten.matmul.default, (floats(3, L, 1, 4), floats(3, L, 4, 2)), {}
    sdpa = aten.scaled_dot_product_attention.default
    for kwargs in ({}, {"scale": 0.7}, {"is_causal": True}, {"attn_mask": floats(3, 2, L, 4)[..., :1]}):
        yield sdpa, (floats(3, 2, L, 4), floats(3, 2, L, 4), floats(3, 2, L, 6)), kwargs
    yield sdpa, (floats(3, 4, L, 4), floats(3, 2, L, 4), floats(3, 2, L, 6)), {"enable_gqa": True}
    yield sdpa, (floats(3, L, 4), floats(3, L, 4), floats(3, L, 6)), {}
    yield sdpa, (floats(L, 4), floats(L, 4), floats(L, 6)), {}
    yield sdpa, (floats(3, 2, L, 4), floats(3, 1, L, 4), floats(1, 2, L, 6)), {}


@by_hand
def lookups() -> Iterator[Sample]:
    table, ids = floats(7, 4), ints(7, 3, L)
    for args in ((), (2,), (-1, True), (-1, False, True), (3, False)):
        yield aten.embedding.default, (table, ids, *args), {}
    yield aten.embedding.default, (table, ids[0]), {"padding_idx": 0}
    source = floats(3, L, 6)
    yield aten.gather.default, (source, 2, ints(6, 3, L, 2)), {}
    yield aten.gather.default, (source, -1, ints(6, 2, L, 4)), {}
    yield aten.gather.default, (source, -3, ints(3, 2, L, 6)), {}
    yield aten.gather.default, (source, 1, ints(L, 3, L, 6)), {}
    yield aten.gather.default, (source, 2, ints(6, 3, 2, 2)), {}
    yield aten.gather.default, (source, -1, ints(6, 3, L, 1)), {"sparse_grad": True}
    yield aten.index_select.default, (source, -1, ints(6, 4)), {}
    yield aten.index_select.default, (source, 1, ints(L, 4)), {}
    yield aten.index_select.default, (source, 0, ints(3, L)), {}
    index = aten.index.Tensor
    yield index, (table, [ids]), {}
    yield index, (table, [ids - 7]), {}
    yield index, (table, [None, ints(4, 3)]), {}
    yield index, (source, [None, None, ints(6, 3)]), {}
    yield index, (source, [ints(3, 2), None, ints(6, 2)]), {}
    yield index, (source, [None, ints(L, 2)]), {}
    yield index, (source, [ints(3, 2, 1), ints(L, 3)]), {}
    yield index, (source, [None, torch.tensor([True, False, True, True, False])]), {}
    yield index, (source, [torch.tensor([1, 0, 1], dtype=torch.uint8)]), {}
    yield index, (table, [ids, ints(4, 3, 1)]), {}
    yield index, (table, [ids[:, :, None], ints(4, 2)]), {}


@by_hand
def views() -> Iterator[Sample]:
    x = floats(3, L, 4)
    for op in (aten.view.default, aten.reshape.default, aten._unsafe_view.default):
        for shape in ([3, L, 2, 2], [3 * L, 4], [-1, 4], [3, L, -1], [1, 3, 1, L, 4], [3, 4, L], [3, L * 4]):
            if op is not aten._unsafe_view.default or -1 not in shape:
                yield op, (x, shape), {}
    yield aten.flatten.using_ints, (x,), {}
    yield aten.flatten.using_ints, (x, 0, 1), {}
    yield aten.flatten.using_ints, (x, -2), {}
    yield aten.unflatten.int, (x, -1, [2, -1]), {}
    yield aten.unflatten.int, (floats(L, 4), 0, [1, L]), {}
    yield aten.view_as.default, (x, floats(3, L, 2, 2)), {}
    yield aten.reshape_as.default, (x, floats(3 * L, 4)), {}
    yield aten.transpose.int, (x, -1, 0), {}
    yield aten.transpose.int, (x, 1, 2), {}
    yield aten.permute.default, (x, [-1, 0, 1]), {}
    yield aten.t.default, (x[0],), {}
    yield aten.t.default, (x[0, 0],), {}
    yield aten.mT.default, (x,), {}
    yield aten.numpy_T.default, (x,), {}
    for dim in (0, -1, 3, -4):
        yield aten.unsqueeze.default, (x, dim), {}
    thin = floats(1, L, 1, 4, 1)
    yield aten.squeeze.default, (thin,), {}
    for dim in (0, 1, -1, -5, -4):
        yield aten.squeeze.dim, (thin, dim), {}
    yield aten.squeeze.dims, (thin, [0, 1, -1]), {}
    yield aten.squeeze.dims, (thin, []), {}
    yield aten.expand.default, (floats(L, 1), [3, L, 4]), {}
    yield aten.expand.default, (floats(L, 1), [3, -1, 4]), {}
    yield aten.expand.default, (floats(1, 4), [L, 4]), {}
    yield aten.expand.default, (floats(4), [L, 4]), {}
    yield aten.broadcast_to.default, (floats(L, 1), [3, L, 4]), {}
    yield aten.expand_as.default, (floats(L, 1), floats(3, L, 4)), {}
    yield aten.expand_as.default, (floats(1, 1), floats(3, L, 4)), {}


@by_hand
def parts() -> Iterator[Sample]:
    x = floats(3, L, 6)
    for start, end in ((0, 2), (-2, None), (-9, 4), (1, 99), (None, -1), (4, 2), (1, 2**63 - 1)):
        for dim in (-1, 0, 1):
            yield aten.slice.Tensor, (x, dim, start, end), {}
    yield aten.slice.Tensor, (x, 2, 0, 6, 2), {}
    yield aten.slice.Tensor, (x, 1, 0, 5, 2), {}
    yield aten.slice.Tensor, (x,), {"start": 1}
    for dim, index in ((0, -1), (-1, 3), (1, 2), (-3, 0)):
        yield aten.select.int, (x, dim, index), {}
    yield aten.chunk.default, (x, 4, -1), {}
    yield aten.chunk.default, (x, 2), {}
    yield aten.split.Tensor, (x, 4, -1), {}
    yield aten.split.Tensor, (x, 2), {}
    yield aten.split.sizes, (x, [1, 5], -1), {}
    yield aten.split_with_sizes.default, (x, [1, 2, 3], 2), {}
    yield aten.split_with_sizes.default, (x, [1, 2]), {"dim": -3}
    yield aten.unbind.int, (x,), {}
    yield aten.unbind.int, (x, -1), {}
    for dim in (0, -1, 1):
        yield aten.cat.default, ([x, x * 2], dim), {}
        yield aten.stack.default, ([x, floats(3, L, 6)], dim), {}
    yield aten.cat.default, ([x, floats(3, L, 2)], -1), {}
    yield aten.cat.default, ([x, floats(2, L, 6)],), {}
    yield aten.cat.default, ([x, floats(0), floats(3, L, 1)], -1), {}
    yield aten.stack.default, ([x, x], -4), {}
    yield aten.stack.default, ([x, x],), {}


@by_hand
def repetitions() -> Iterator[Sample]:
    x = floats(3, L, 4)
    yield aten.repeat_interleave.self_int, (x, 2, 0), {}
    yield aten.repeat_interleave.self_int, (x, 3), {"dim": -1}
    yield aten.repeat_interleave.self_int, (x, 2), {}
    yield aten.repeat_interleave.self_int, (x, 2, 1), {}
    yield aten.repeat_interleave.self_int, (x, 2), {"dim": 2, "output_size": 8}
    for op in (aten.repeat.default, aten.tile.default):
        for counts in ([2, 1, 3], [2, 3, 1, 1], [1, 2, 1], [5, 1, 1], [1, 1, L]):
            yield op, (x, counts), {}
    yield aten.tile.default, (x, [2]), {}
    for amounts in ([1, 2], [-1, 0], [0, 0, 1, 1], [0, 0, 0, 0, 2, -1], [1, 1, 0, 0, 0, 1]):
        yield aten.constant_pad_nd.default, (x, amounts, 0.5), {}
        yield aten.pad.default, (x, amounts), {}
        yield aten.pad.default, (x, amounts, "constant", 2.0), {}
    for mode in ("reflect", "replicate", "circular"):
        yield aten.pad.default, (x, [1, 2], mode), {}
        yield aten.pad.default, (floats(2, 3, L, 4), [1, 0, 1, 1], mode), {}
    yield aten.flip.default, (x, [-1, 0]), {}
    yield aten.flip.default, (x, [1]), {}
    yield aten.flip.default, (x, []), {}
    yield aten.roll.default, (x, [1], [-1]), {}
    yield aten.roll.default, (x, [1, -1], [0, 2]), {}
    yield aten.roll.default, (x, [2], [1]), {}
    yield aten.roll.default, (x, [2]), {}


@by_hand
def fills() -> Iterator[Sample]:
    x = floats(3, L)
    for op in (aten.new_ones.default, aten.new_zeros.default):
        yield op, (x, [2, 3]), {}
        yield op, (x, [3, L]), {}
    yield aten.new_full.default, (x, [L], 2), {}
    yield aten.sum.default, (x,), {}
    yield aten.mean.default, (x,), {"dtype": torch.float32}
    yield aten.arange.default, (L,), {}
    yield aten.arange.start, (1, L), {}
    yield aten.arange.start_step, (0, L, 2), {}
    yield aten.zeros.default, ([3, L],), {}
    yield aten.ones.default, ([3, L],), {}
    yield aten.full.default, ([3, L], 2), {}
    yield aten.empty.memory_format, ([3, L],), {}
    yield aten.eye.default, (L,), {}
    yield aten.scalar_tensor.default, (2,), {}
    yield F.dropout, (x, 0.0), {}
    yield aten.fill.Scalar, (x, 2.0), {}
    yield aten.fill.Tensor, (x, torch.tensor(2.0, dtype=torch.float64)), {}
    yield aten.zero.default, (x,), {}


@by_hand
def random_numbers() -> Iterator[Sample]:
    x, probable = floats(3, L, 4), floats(3, L, 4).sigmoid()
    yield aten.rand_like.default, (x,), {}
    yield aten.randn_like.default, (x,), {"dtype": torch.float32}
    yield aten.randint_like.default, (x, 5), {}
    yield aten.randint_like.low_dtype, (x, 2, 5), {"dtype": torch.int64}
    yield aten.uniform.default, (x, 0.5, 2.0), {}
    yield aten.normal_functional.default, (x, 1.0, 0.5), {}
    yield aten.exponential.default, (x, 2.0), {}
    yield aten.cauchy.default, (x,), {}
    yield aten.log_normal.default, (x, 0.0, 0.5), {}
    yield aten.geometric.default, (x, 0.3), {}
    yield aten.bernoulli.p, (x, 0.3), {}
    yield aten.bernoulli.default, (probable,), {}
    yield aten.bernoulli.Tensor, (x, probable), {}


@by_hand
def scatters() -> Iterator[Sample]:
    x = floats(3, L, 4)
    for width in (1, 4):
        places = torch.randint(0, 4, (3, L, width))
        yield aten.scatter.src, (x, -1, places, floats(3, L, width)), {}
        yield aten.scatter.value, (x, -1, places, 1.5), {}
        yield aten.scatter_add.default, (x, 2, places, floats(3, L, width)), {}
        yield aten.scatter_reduce.two, (x, -1, places, floats(3, L, width), "amax"), {}
    yield aten.scatter.value, (x, 1, torch.randint(0, L, (3, L, 4)), 1.5), {}
    yield aten.scatter.src, (x, 0, torch.randint(0, 3, (2, L, 4)), floats(3, L, 4)), {}
