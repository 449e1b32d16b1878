"""The training step of a schedule as instructions, for people and for other programs to read."""

from __future__ import annotations

import json
import re
from typing import Any

from torch.fx import Node

from ..passes.graph.facts import Facts
from ..passes.graph.sources import path
from ..passes.s6_schedule.checker import check_step
from ..passes.s6_schedule.program import StepProgram
from ..passes.s6_schedule.text import step_text, step_to_json


class StepListing:
    """What a training step does, in order, for a batch without padding. `print` shows it.

    Args:
        instructions: the step.
        facts: of the graph.

    Attributes:
        instructions: the step as data, see `passes.s6_schedule.program`.
    """

    def __init__(self, instructions: StepProgram, facts: Facts) -> None:
        self.instructions, self._facts = instructions, facts

    def check(self) -> None:
        """Prove that nothing is read before it is made or after it is dropped, and that nothing is left.

        It is proved of each step that runs, too, before it does.

        Raises:
            UnsoundStep: it is not so.
        """
        check_step(self.instructions)

    def to_dict(self) -> dict[str, Any]:
        """The step as dicts, lists, strings, numbers and booleans; values by name."""
        return step_to_json(self.instructions)

    def to_json(self) -> str:
        """The same as JSON text."""
        return json.dumps(self.to_dict(), indent=1)

    def text(self, procedures: bool = True) -> str:
        """The instructions, one a line.

        Args:
            procedures: those of the procedures of segments as well, below the step.
        """
        found = step_text(self.instructions, self._names(), procedures)
        for symbol, name in self._sizes().items():
            found = re.sub(rf"\b{symbol}\b", name, found)
        return found

    def _sizes(self) -> dict[str, str]:
        """T and, where there is one, the batch size."""
        others = [s for s in self._facts.values if s != self._facts.sequence]
        return {str(self._facts.sequence): "T", **({str(others[0]): "B"} if len(others) == 1 else {})}

    def _names(self) -> dict[Node, str]:
        return {n: path(n) for n in self._facts.nodes if n.op == "placeholder"}

    def __str__(self) -> str:
        return self.text()
