"""Whether a model is streamed, for people to read."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..schedule import Schedule

# Of a reason that has many lines, such as Dynamo's.
LONGEST_REASON = 300


@dataclass(frozen=True)
class Status:
    """Whether the training steps of a model are streamed.

    Attributes:
        door: what streams it, "transform" or "torch.compile"; None: nothing does.
        streamed: the last training step was streamed.
        since: when it became so, streamed or not; None: there was no training step.
        since_step: the number of the training step with which it became so, from 1; None: it was no step.
        why_not: why the last step was not streamed, or why there was none; None if it was.
        reasons: how many steps were not streamed, by reason.
        streamed_steps, unstreamed_steps: training steps from `transform` to `restore`. Under `torch.compile`
            calls of compiled graphs that have a gradient; a model whose graph is cut has several of them in a
            step.
        part: what alone is streamed, if it is not the whole model: its backbone, under a forward that
            somebody has put over the model's own.
        schedule: of the graph that was compiled last; None: there is none.
    """

    door: str | None
    streamed: bool
    since: datetime | None
    since_step: int | None
    why_not: str | None
    reasons: dict[str, int]
    streamed_steps: int
    unstreamed_steps: int
    part: str | None
    schedule: Schedule | None

    def __str__(self) -> str:
        lines = [self._first()]
        if self.why_not is not None:
            lines.append(f"  why not: {_short(self.why_not)}")
        if self.part is not None:
            lines.append(f"  only a part of it: {self.part}")
        lines.append(f"  training steps: {self.streamed_steps} streamed, {self.unstreamed_steps} unstreamed")
        others = {w: n for w, n in self.reasons.items() if w != self.why_not}
        lines += [f"  {count} unstreamed: {_short(why)}" for why, count in others.items()]
        if self.schedule is not None:
            lines.append("  last schedule: " + str(self.schedule).splitlines()[0])
        return "\n".join(lines)

    def _first(self) -> str:
        if self.since is None:
            return "not streamed"
        word = "streamed" if self.streamed else "not streamed"
        by = f" by {self.door}" if self.streamed else ""
        step = "" if self.since_step is None else f" (training step {self.since_step})"
        return f"{word}{by} since {self.since:%Y-%m-%d %H:%M:%S}{step}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_REASON else line[: LONGEST_REASON - 3] + "..."
