"""The schedule of a compiled graph, for people to read."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from .show.code import generate
from .show.dot import dot
from .show.memory_plot import plot_memory
from .show.page import page
from .show.schedule_text import schedule_text
from .show.scheduled_step import ScheduledStep
from .show.step_listing import StepListing
from .show.step_memory import StepMemory
from .show.whole_files import check_writable, write_whole


@dataclass
class Schedule(ScheduledStep):
    """What the compiler decided for one captured graph.

    Attributes:
        facts: what was proved; `segments` are in order of execution.
        options: the options it was compiled with.
        seq_len: tokens of a sequence, where the schedule was made for a certain length; else None.
        sweeps: over the loss head in a training step: 1 if its gradient comes with the loss, 2 if the loss
            must be known first, 0 if there is no loss.
        given: the options as they were given; `options` has what the compiler has chosen instead of "auto".
        chosen_loss_rows: rows of a chunk of the loss head, as chosen for the last new length; None: not yet.
        more_memory: what more memory would buy, in words, where `options` do not say it.
        number: schedules are counted in the order in which they are made.
        executor: what runs it, if it was compiled to be run.
        check: what the self-check before its first use has found; None: there was none yet.
        unstreamed: why the graph runs unstreamed all the same, as a step has shown; else "".
    """

    _code: tuple | None = field(default=None, repr=False, compare=False)

    @property
    def program(self) -> StepListing:
        """The instructions of the step: which segment runs when, on what, and how long its values are held.

        Raises:
            ValueError: the graph has nothing that is streamed.
        """
        if not self.segments:
            raise ValueError("the graph runs unstreamed: there are no instructions")
        return StepListing(self.cost.step_program, self.facts)

    def code(self) -> str:
        """The compiled step as one Python module that runs, forward and backward.

        It needs only PyTorch, and this package where it calls ops of its own (recurrences, cuDNN's blocks).

        Each op has a line with its shape, under the line of the model that it comes from. `exec` the text and
        call `step(inputs..., parameters)`, where `parameters` is a dict by dotted name; it returns the loss
        and a dict of gradients. It is printed for `seq_len`, or where that is None for the length of the call
        that was captured. It serves other lengths whose chunks are alike, and raises for those whose chunks
        are not. With `order="chunks"` it runs layer by layer all the same. The programs are traced at the
        first call, which takes some seconds.

        Raises:
            CompileError: a program cannot be traced.
            ValueError: the graph has nothing that is streamed.
        """
        if not self.segments:
            raise ValueError("the graph runs unstreamed: there is no program to print")
        key = (self.seq_len, self.options)
        if self._code is None or self._code[0] != key:
            self._code = (key, generate(self.facts, self.options, self.seq_len))
        return self._code[1]

    def to_dot(self) -> str:
        """The segment graph as Graphviz text: `dot -Tsvg` draws it.

        Segments are boxes, dashed with their reason where they run unchunked; edges are what flows between
        them, with bytes a row of the batch; a carried state is an edge of a segment to itself.
        """
        return dot(self)

    def to_html(self, path: str | Path, title: str | None = None) -> None:
        """Write the schedule as one page of HTML that needs no network and no other file.

        It shows the graph of segments with their programs, which rows of the input each value reads, the
        memory of the step over time by cause, and what was not chunked.

        Args:
            path: the file; it is written whole or not at all.
            title: what it is the schedule of, a model's name say.

        Raises:
            OutputError: the file cannot be written.
            CompileError: a program cannot be traced.
            ValueError: the graph has nothing that is streamed.
        """
        check_writable(path)
        memory = StepMemory.of(self)
        shown = memory.schedule
        assert isinstance(shown, Schedule)
        write_whole(path, page(memory, shown.code(), title, str(shown.program)).encode())

    def plot_memory(self, path: str | Path, title: str | None = None) -> None:
        """Draw the memory of the step, eager, with gradient checkpointing and streamed.

        The left panel is one step over time, the right one the peak against the sequence length. Needs
        matplotlib: `pip install matplotlib`.

        Args:
            path: a file that ends in .png, .svg or .pdf; it is written whole or not at all.
            title: what it is the memory of, a model's name say.

        Raises:
            OutputError: matplotlib is missing, the format is unknown, or the file cannot be written.
            ValueError: the graph has nothing that is streamed.
        """
        plot_memory(self, path, title)

    def __str__(self) -> str:
        return schedule_text(self)
