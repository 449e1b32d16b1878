"""How long, or in how much memory. Nothing here imports PyTorch: the command line asks before it does."""

from __future__ import annotations

from ..errors import PlanError
from ..units import parse_bytes


def check_amounts(seq_len: int | None, memory: str | int | None) -> None:
    """Check that there is something to plan for.

    Args:
        seq_len: tokens of a sequence, or None.
        memory: of a device, in bytes or as people write it, or None.

    Raises:
        PlanError: there is neither, or the memory is no amount.
    """
    if seq_len is None and memory is None:
        raise PlanError("give a sequence length (seq_len), an amount of memory (memory), or both")
    if memory is not None:
        try:
            parse_bytes(memory)
        except ValueError as error:
            raise PlanError(str(error)) from error
