"""What `verify` found, for programs and for people to read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from ..passes.graph.facts import Reach
from ..probing.tried_claims import NotClaimed, Probe, SegmentSummary
from ..show.scheduled_segment import READS

SHOWN = 10  # lines of one kind, at most


@dataclass(frozen=True)
class GradientCheck:
    """The gradient of one parameter, streamed against eager.

    Attributes:
        parameter: its name.
        norm: L2 norm of eager's gradient.
        difference: L2 norm of the difference; a gradient that one of the two does not have counts as zero.
        scale: what the difference is measured by: the norm, or a thousandth of that of all gradients together
            where this is more.
        rtol: largest relative difference that counts as equal.
    """

    parameter: str
    norm: float
    difference: float
    scale: float
    rtol: float

    @property
    def relative(self) -> float:
        """The relative difference: difference / scale; infinite where there is nothing to compare."""
        if self.difference == 0:
            return 0.0
        comparable = self.scale > 0 and not math.isnan(self.difference)
        return self.difference / self.scale if comparable else math.inf

    @property
    def ok(self) -> bool:
        """True if the relative difference is allowed."""
        return self.relative <= self.rtol


@dataclass(frozen=True)
class LossCheck:
    """The loss of the step, eager and streamed, and the largest relative difference that is allowed."""

    eager: float
    streamed: float
    rtol: float

    @property
    def relative(self) -> float:
        """The relative difference; infinite where the eager loss is zero and the streamed one is not."""
        gap = abs(self.streamed - self.eager)
        return gap / abs(self.eager) if self.eager else (0.0 if gap == 0 else math.inf)

    @property
    def ok(self) -> bool:
        """True if the relative difference is allowed."""
        return self.relative <= self.rtol


@dataclass(frozen=True)
class Verification:
    """The result of `verify`; `print` shows it.

    Attributes:
        model: the class of the model.
        batch_size, seq_len: of the batch.
        chunk, loss_chunk: rows of the chunks in the streamed step.
        rtol: relative tolerance of loss and gradients.
        rows: the rows r of the independence probe.
        loss: both losses; None if the streamed step failed (then `notes` says how).
        gradients: one entry for each trainable parameter that has a gradient in either step.
        probes: one entry for each value of which the analysis claims something.
        not_claimed: what runs unchunked, and other values of which nothing is claimed.
        segments: the probes, summed up by segment.
        notes: what a reader must know, e.g. that dropout was off.
    """

    model: str
    batch_size: int
    seq_len: int
    chunk: int | str
    loss_chunk: int
    rtol: float
    rows: tuple[int, ...]
    loss: LossCheck | None
    gradients: tuple[GradientCheck, ...]
    probes: tuple[Probe, ...] = field(repr=False)
    not_claimed: tuple[NotClaimed, ...] = ()
    segments: tuple[SegmentSummary, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Loss and every gradient agree, and no claim was contradicted."""
        return self.loss is not None and self.loss.ok and not self.different and not self.contradicted

    @property
    def different(self) -> tuple[GradientCheck, ...]:
        """Gradients that differ by more than is allowed."""
        return tuple(g for g in self.gradients if not g.ok)

    @property
    def contradicted(self) -> tuple[Probe, ...]:
        """Claims that execution contradicts."""
        return tuple(p for p in self.probes if not p.ok)

    @property
    def worst(self) -> GradientCheck | None:
        """The gradient that differs most."""
        return max(self.gradients, key=lambda g: g.relative, default=None)

    # ---- for programs

    def as_dict(self) -> dict[str, Any]:
        """All of it, made of what JSON has; a number that is not finite is None."""
        probes = [{**asdict(p), "reach": p.reach.name.lower(), "ok": p.ok} for p in self.probes]
        segments = [{**asdict(s), "reach": s.reach.name.lower()} for s in self.segments]
        gradients = [{**asdict(g), "relative": g.relative, "ok": g.ok} for g in self.gradients]
        loss = self.loss and {**asdict(self.loss), "relative": self.loss.relative, "ok": self.loss.ok}
        own = {k: getattr(self, k) for k in ("model", "batch_size", "seq_len", "chunk", "loss_chunk", "rtol")}
        found = {
            "ok": self.ok, **own, "rows": list(self.rows), "notes": list(self.notes), "loss": loss,
            "gradients": gradients, "segments": segments, "probes": probes,
            "not_claimed": [asdict(n) for n in self.not_claimed],
        }  # fmt: skip
        return _finite(found)

    # ---- for people

    def __str__(self) -> str:
        lines = [self.title, *(f"note: {n}" for n in self.notes), self.loss_line(), self.gradient_line()]
        lines += [f"  {line}" for line in self.gradient_lines()]
        lines.append(self.probe_line())
        lines.append(f"  {'segment':<9}{'kind':<8}{'values':>7}  {'result':<15}claim")
        for where, kind, values, result, claim in self.segment_rows():
            lines.append(f"  {where:<9}{kind:<8}{values:>7}  {result:<15}{claim}")
        lines += [f"  contradicted: {line}" for line in self.contradiction_lines()]
        lines += [f"  not claimed: {line}" for line in self.not_claimed_lines()]
        return "\n".join([*lines, self.verdict])

    @property
    def title(self) -> str:
        """What was verified: the model, sequences, tokens and chunks."""
        sequences = "1 sequence" if self.batch_size == 1 else f"{self.batch_size} sequences"
        return (
            f"{self.model}, {sequences} of {self.seq_len} tokens, chunk {self.chunk}, "
            f"loss chunk {self.loss_chunk}"
        )

    @property
    def verdict(self) -> str:
        """The outcome in one line, with all that is wrong."""
        if self.ok:
            return "confirmed: gradients agree, and every value depends on the rows that it should"
        wrong = []
        if self.loss is None:
            wrong.append("the streamed step failed")
        elif self.different or not self.loss.ok:
            wrong.append("loss or gradients differ")
        if self.contradicted:
            count = len(self.contradicted)
            wrong.append(f"{count} value(s) depend on rows that they should not")
        return "NOT CONFIRMED: " + "; ".join(wrong)

    def loss_line(self) -> str:
        """The line about the loss."""
        if self.loss is None:
            return "loss: none"
        eager, streamed, relative = self.loss.eager, self.loss.streamed, self.loss.relative
        return f"loss: eager {eager:.8g}, streamed {streamed:.8g}, relative difference {relative:.1e}"

    def gradient_line(self) -> str:
        """The line about the gradients: how many agree, and the largest relative difference."""
        if self.loss is None or self.worst is None:
            return "gradients: not compared"
        equal = len(self.gradients) - len(self.different)
        return (
            f"gradients: {equal} of {len(self.gradients)} parameters agree within {self.rtol:g}; the largest "
            f"relative difference is {self.worst.relative:.1e} ({self.worst.parameter})"
        )

    def gradient_lines(self) -> Iterator[str]:
        """Gradients that differ, the worst first."""
        wrong = sorted(self.different, key=lambda g: g.relative, reverse=True)
        for check in wrong[:SHOWN]:
            yield (
                f"differs: {check.parameter}, relative difference {check.relative:.1e} "
                f"(norm {check.norm:.3g}, norm of the difference {check.difference:.3g})"
            )
        if len(wrong) > SHOWN:
            yield f"... and {len(wrong) - SHOWN} more"

    def probe_line(self) -> str:
        """The line about the independence probe: how many values are as claimed."""
        if not self.probes:
            return "independence probe: nothing of the model is claimed"
        rows = ", ".join(map(str, self.rows))
        confirmed = len(self.probes) - len(self.contradicted)
        return f"independence probe at rows {rows}: {confirmed} of {len(self.probes)} values as claimed"

    def segment_rows(self) -> Iterator[tuple[str, str, str, str, str]]:
        """The table: segments, kind, values tried, result, claim."""
        for s in self.segments:
            where = str(s.first) if s.first == s.last else f"{s.first}-{s.last}"
            if not s.values:
                yield where, s.kind, "-", "not claimed", f"runs unchunked: {s.reason}" if s.reason else "-"
                continue
            result = f"{s.contradicted} contradicted" if s.contradicted else "confirmed"
            yield where, s.kind, str(s.values), result, claim(s.reach, s.window)
        rest = [p for p in self.probes if p.segment is None]
        if rest:
            wrong = sum(not p.ok for p in rest)
            result = f"{wrong} contradicted" if wrong else "confirmed"
            yield "-", "loss", str(len(rest)), result, claim(Reach.ROW, None)

    def contradiction_lines(self) -> Iterator[str]:
        """The first values that read other rows than was claimed, a line each."""
        for probe in self.contradicted[:SHOWN]:
            yield (
                f"{probe.op} ({probe.value}) was said to read {claim(probe.reach, probe.window)}, but "
                f"{'; '.join(probe.contradictions[:3])} ({probe.line})"
            )
        if len(self.contradicted) > SHOWN:
            yield f"... and {len(self.contradicted) - SHOWN} more"

    def not_claimed_lines(self) -> Iterator[str]:
        """The first ops of which nothing is claimed, a line each, with the reason."""
        for entry in self.not_claimed[:SHOWN]:
            yield f"{entry.op}: {entry.reason} ({entry.line})"
        if len(self.not_claimed) > SHOWN:
            yield f"... and {len(self.not_claimed) - SHOWN} more"


def claim(reach: Reach, window: int | None) -> str:
    """A claim in words, as in the schedule: "its own row"."""
    return READS[reach].format(window=window or "some")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
