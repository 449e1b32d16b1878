"""Sets of ops that several passes ask for: views, reshapes, expansions, ops whose operands are aligned."""

from __future__ import annotations

import torch

from .pointwise import ELEMENTWISE_LOSSES, pointwise_ops

aten = torch.ops.aten

VIEW_ONLY = {
    aten.view.default, aten.reshape.default, aten.transpose.int, aten.permute.default, aten.unsqueeze.default,
    aten.expand.default, aten.squeeze.dim, aten.t.default, aten.mT.default, aten.contiguous.default,
    aten.clone.default, aten.repeat_interleave.self_int, aten.flatten.using_ints,
}  # fmt: skip
RESHAPES = {
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints,
    aten.unflatten.int, aten.view_as.default, aten.reshape_as.default,
    # by its sizes: `squeeze` itself would also take away the rows of a chunk of one row
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
}  # fmt: skip
EXPANDS = {aten.expand.default, aten.expand_as.default, aten.broadcast_to.default}
ALIGNED = {*pointwise_ops(), *ELEMENTWISE_LOSSES}
