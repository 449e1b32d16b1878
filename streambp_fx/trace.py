"""The program after each pass, and the difference between two."""

from __future__ import annotations

import contextlib
import difflib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from .errors import CaptureError, InputError, UnknownPassError
from .explain import Captured, _Explained, _prepared
from .models.inputs import what_does_not_fit
from .options import Options
from .passes import PASSES
from .passes.graph.facts import CapturedGraph, Facts
from .passes.pipeline.log import masks_text, observed, program_text
from .passes.pipeline.runner import Pass
from .passes.s5_lower.lower import PROGRAM_PASSES, Lowering
from .passes.s6_schedule.transforms import STEP_PASSES, Scheduling
from .schedule import Schedule
from .units import did_you_mean

EVERY: tuple[Pass[Any, Any], ...] = (*PASSES, *PROGRAM_PASSES, *STEP_PASSES)
PURPOSES = {p.name: p.purpose for p in EVERY}


@dataclass(frozen=True)
class PassRecord:
    """One pass that ran.

    Attributes:
        name: of the pass.
        ops: in the program after it; of a pass over chunk programs, in all of them together; of one over the
            step, its instructions.
        seconds: that it took. The masks are proved in the pass before them, so theirs are 0.
        text: the program after it; of "masks", what was proved of them.
        purpose: what the pass does, in one line.
    """

    name: str
    ops: int
    seconds: float
    text: str = field(repr=False)
    purpose: str = ""


class Trace:
    """What each pass made of a model's training step, in order.

    Attributes:
        passes: one record a pass that ran: name, ops in the program after it, seconds, text.
        schedule: what came out.
    """

    def __init__(self, passes: tuple[PassRecord, ...], schedule: Schedule) -> None:
        self.passes, self.schedule = passes, schedule

    @property
    def names(self) -> list[str]:
        """What `after` takes: the passes that ran, and "lower" for the finished program."""
        return [*(p.name for p in self.passes), "lower"]

    def after(self, name: str) -> str:
        """The program after a pass as text: an op a line, with shape, what was proved of it, and source line.

        "masks" gives the predicates that were proved of the masks, and "lower" the finished program, which is
        `schedule.code()`.

        Raises:
            UnknownPassError: there is no such pass.
        """
        for record in self.passes:
            if record.name == name:
                return record.text
        if name != "lower":
            raise UnknownPassError(_unknown(name, self.names))
        return self.schedule.code()

    def diff(self, before: str, after: str) -> str:
        """Unified difference between the programs after two passes, "" if there is none.

        Args:
            before, after: names of the passes.

        Raises:
            UnknownPassError: there is no such pass.
        """
        return diff(self.after(before), self.after(after), before, after)

    def __str__(self) -> str:
        lines = [f"{'pass':<24}{'ops':>6}{'seconds':>10}  what it does"]
        lines += [f"{p.name:<24}{p.ops:>6}{p.seconds:>10.2f}  {p.purpose}".rstrip() for p in self.passes]
        return "\n".join(lines)


def trace(model: nn.Module, batch: Mapping[str, Any], chunk: int | str = "auto", **options: Any) -> Trace:
    """The program of a training step after each pass. Nothing is run, and the model is left as it was.

    Args:
        model: a causal language model, transformed or not; its weights may be on the meta device.
        batch: keyword arguments of its forward, labels among them.
        chunk: rows of the sequence in a chunk of a layer, or "auto".
        options: the other fields of `Options`.

    Raises:
        ValueError: an option is unknown or has a value that is not allowed.
        InputError: the batch is no dictionary, or does not fit the model.
        CaptureError: the model's forward cannot be captured as one graph, or has nothing to stream.
        CompileError: a pass failed.
    """
    if not isinstance(batch, Mapping):
        raise InputError(
            "batch must be a dictionary of the arguments of the model's forward, such as "
            f'{{"input_ids": ids, "labels": ids}}, not {type(batch).__name__}'
        )
    parsed = Options.parse({"chunk": chunk, **options})
    records: list[PassRecord] = []
    found: list[Captured] = []

    def observe(name: str, result: CapturedGraph | Facts, seconds: float) -> None:
        ops = sum(n.op == "call_function" for n in result.module.graph.nodes)
        if name == "capture":
            records.clear()  # a graph that was captured again
        records.append(PassRecord(name, ops, seconds, program_text(result), PURPOSES[name]))
        if name == "footprints" and isinstance(result, Facts):
            records.append(PassRecord("masks", ops, 0.0, masks_text(result), "what is proved of the masks"))

    try:
        with _prepared(model, parsed, found), observed(observe), contextlib.suppress(_Explained):
            model(**batch)
    except (CaptureError, TypeError) as error:
        odd = what_does_not_fit(model, batch)
        if odd is None:
            raise
        raise InputError(f"{type(model).__name__} cannot be traced with this batch: {odd}") from error
    if not found:
        raise CaptureError(f"the forward of {type(model).__name__} gave no graph to trace")
    schedule, _ = found[-1]
    if schedule.facts.sequence is not None:
        schedule.seq_len = schedule.facts.values[schedule.facts.sequence]
    return Trace((*records, *_below(schedule)), schedule)


def _below(schedule: Schedule) -> list[PassRecord]:
    """The passes over chunk programs, all programs together, and those over the step."""
    ops: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    texts: dict[str, list[str]] = {}

    def observe(name: str, result: Lowering | Scheduling, took: float) -> None:
        if isinstance(result, Scheduling):
            ops[name] += len(list(result.program.instructions()))
        else:
            ops[name] += sum(n.op == "call_function" for n in result.module.graph.nodes)
        seconds[name] += took  # type: ignore[assignment]
        texts.setdefault(name, []).append(str(result))

    def observe_programs(name: str, result: Lowering | Scheduling, took: float) -> None:
        if isinstance(result, Lowering):  # the step that is printed is made by the same passes
            observe(name, result, took)

    if schedule.segments:
        with observed(observe_programs):
            schedule.code()
        with observed(observe):
            schedule.program  # noqa: B018  (is made when it is asked for)
    order = [name for name in PURPOSES if name in texts]
    return [PassRecord(n, ops[n], float(seconds[n]), "\n\n".join(texts[n]), PURPOSES[n]) for n in order]


def diff(before: str, after: str, before_name: str = "before", after_name: str = "after") -> str:
    """Unified difference between two program texts, "" if they are equal.

    Args:
        before, after: the texts, of `Trace.after` or `Schedule.code`.
        before_name, after_name: what the first two lines of the difference call them.

    Raises:
        TypeError: one of them is no text.
    """
    for text in (before, after):
        if not isinstance(text, str):
            raise TypeError(
                f"diff compares texts, as trace.after(name) gives them, not {type(text).__name__}"
            )
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), before_name, after_name, lineterm=""
    )
    return "\n".join(lines)


def _unknown(name: object, valid: list[str]) -> str:
    return f"no pass is called {name!r}; the passes are {', '.join(valid)}.{did_you_mean(str(name), valid)}"
