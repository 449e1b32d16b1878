"""A convolution along the sequence that reads no later rows, as one op: `streambp_fx::causal_conv1d`.

Models write it as a convolution that pads both sides, and cut off what is too much. In between there are more
entries than rows, of which nobody could say what they are. Without a weight rows are only moved.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from ..facts import shape_of
from ..op_arguments import arguments
from .recurrence import RECURRENCES, Recurrence

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


def _step(
    operands: Sequence[Tensor | None], settings: Sequence[float], state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The convolution as a recurrence: its state are the rows before, as many as the weight is wide.

    One more than is read, so that the sizes of the state are sizes of operands.
    """
    rows, weight, bias = operands
    assert rows is not None and weight is not None
    before = rows.new_zeros((*rows.shape[:2], weight.shape[2])) if state is None else state
    there = torch.cat([before, rows], -1)
    made = F.conv1d(there.narrow(-1, 1, there.shape[-1] - 1), weight, bias, groups=rows.shape[1])
    return made, there.narrow(-1, rows.shape[-1], weight.shape[2])


#: A convolution of each channel for itself, of neighbouring rows, for the op `recurrence`.
CHANNELS_APART = "streambp_fx.causal_conv1d"
RECURRENCES[CHANNELS_APART] = Recurrence(
    CHANNELS_APART, _step, dims=(2, None, None), rows=2, like=0, state=((0, 0), (0, 1), (1, 2))
)


def rows_before(node: Node) -> int:
    """How many rows before its own a row of a causal convolution, given by its node, reads."""
    call = arguments(node)
    width = 2 if call["weight"] is None else shape_of(call["weight"])[2]
    return int((width - 1) * call["dilation"])
