"""A plan: what a training step needs, and what fits."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from .memory_and_work import WayToRun
from .several import DevicesPlan, TimePlan


@dataclass(frozen=True)
class Plan:
    """What a training step needs, in bytes, and what fits.

    Attributes:
        model: its name.
        fits: the step at `seq_len` fits the budget; True without a budget.
        seq_len: tokens of each sequence: as asked for, or the longest that fits.
        max_seq_len: the longest sequence that fits, tokens; None without a budget.
        batch_size: sequences.
        chunk, loss_chunk: rows of a chunk.
        policy: what is stored for the backward, and where.
        dtype: of the weights.
        memory_bytes: the budget, or None.
        weights_bytes, gradients_bytes, optimizer_bytes: held all the time.
        activation_peak_bytes: peak over those, by the cost model of the schedule.
        peak_bytes: all of it.
        offloaded_bytes: what lies in host memory or on disk meanwhile.
        out_bytes, back_bytes: that go there, and come back to the device, in a step.
        by_cause: the activations at their peak, by cause.
        flops: floating-point operations of one step, products and attention only.
        recompute_factor: those against the eager step's.
        tokens_per_gib: how many tokens more each next GiB buys.
        eager_seq_len, checkpointing_seq_len: the longest sequences that would fit unstreamed, without and
            with gradient checkpointing; None without a budget.
        peak_expression: activation bytes as an expression in T, chunk and loss_chunk.
        flops_expression: floating-point operations of one step, likewise.
        devices: what several devices share and send; None: there is one. All of the above is of one of them.
        time: of the step, a prediction; None: no device was given.
        ways: from the least memory to no recompute, and unstreamed, for a length; None: it was not asked for.
        positions: tokens of a sequence for which the model's config has positions; None: it does not say.
    """

    model: str
    fits: bool
    seq_len: int
    max_seq_len: int | None
    batch_size: int
    chunk: int
    loss_chunk: int
    policy: str
    dtype: str
    memory_bytes: int | None
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activation_peak_bytes: int
    peak_bytes: int
    offloaded_bytes: int
    out_bytes: int
    back_bytes: int
    by_cause: dict[str, int]
    flops: int
    recompute_factor: float
    tokens_per_gib: int
    eager_seq_len: int | None
    checkpointing_seq_len: int | None
    peak_expression: str = field(repr=False)
    flops_expression: str = field(repr=False)
    devices: DevicesPlan | None = field(default=None, repr=False)
    time: TimePlan | None = field(default=None, repr=False)
    ways: tuple[WayToRun, ...] | None = field(default=None, repr=False)
    positions: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """All fields, ready for JSON."""
        return asdict(self)
