"""A convolution along the sequence that reads no later rows, as one op: `streambp_fx::causal_conv1d`.

Models write it as a convolution that pads both sides, and cut off what is too much. In between there are more
entries than rows, of which nobody could say what they are. Without a weight rows are only moved.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from .facts import shape_of
from .op_arguments import arguments

_LIBRARY = torch.library.Library("streambp_fx", "FRAGMENT")
_LIBRARY.define(
    "causal_conv1d(Tensor input, Tensor? weight, Tensor? bias, SymInt dilation, SymInt groups) -> Tensor"
)


def causal_conv1d(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, dilation: int, groups: int
) -> Tensor:
    """A convolution whose row i reads rows up to i.

    Args:
        input: (batch, channels, rows), of any floating dtype.
        weight: (channels made, channels / groups, width). None: row i is row i - `dilation`, or zeros. (By
            weights of 0 and 1 a row that is infinite would make NaN of others.)
        bias: (channels made,) or None.
        dilation: distance of the rows that are read.
        groups: of channels.

    Returns:
        (batch, channels made, rows), of the same dtype.
    """
    before = dilation if weight is None else (weight.shape[2] - 1) * dilation
    padded = torch.cat([input.new_zeros((*input.shape[:2], before)), input], -1)
    if weight is None:
        return padded.narrow(-1, 0, input.shape[-1])
    return F.conv1d(padded, weight, bias, 1, 0, dilation, groups)


_LIBRARY.impl("causal_conv1d", causal_conv1d, "CompositeImplicitAutograd")
CAUSAL_CONV1D = torch.ops.streambp_fx.causal_conv1d.default


def rows_before(node: Node) -> int:
    """How many rows before its own a row of a causal convolution, given by its node, reads."""
    call = arguments(node)
    width = 2 if call["weight"] is None else shape_of(call["weight"])[2]
    return int((width - 1) * call["dilation"])
