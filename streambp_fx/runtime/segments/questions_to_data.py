"""What the host asks the data before a step runs, and reads all at once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ...passes.graph.facts import Facts, Mask, shape_of, tensors_of
from ...passes.masks.at_run_time import data_condition, first_column_condition
from ...passes.s2_prove.footprints import mask_facts


class Questions:
    """Numbers that decide how a step is run.

    NOTE [one synchronisation]: they come from tensors that may lie on a GPU, where each read waits for the
    device. So they are collected, and the first answer reads all of them together.
    """

    def __init__(self) -> None:
        self._open: dict[Hashable, Tensor] = {}
        self._answers: dict[Hashable, list[int]] = {}

    def ask(self, key: Hashable, value: Tensor | bool) -> None:
        """Ask for the numbers of a tensor of int or bool, of any shape, or for one that is known already."""
        if isinstance(value, Tensor):
            self._open[key] = value
        else:
            self._answers[key] = [int(value)]

    def answer(self, key: Hashable) -> list[int] | None:
        """The numbers, in the order in which they lie; None if nobody asked."""
        if key in self._open:
            self._read()
        return self._answers.get(key)

    def _read(self) -> None:
        """Read what is open, in one go on each device."""
        for device in {t.device for t in self._open.values()}:
            own = {k: t for k, t in self._open.items() if t.device == device}
            numbers = torch.cat([t.reshape(-1).to(torch.int64) for t in own.values()]).tolist()
            for key, value in own.items():
                self._answers[key] = numbers[: value.numel()]
                del numbers[: value.numel()]
        self._open.clear()


class FlagQuestions:
    """Where the inputs are 0 that are 0 or 1 for each row, as an attention mask is.

    NOTE [where flags are 0]: it decides nothing about a step, but steps that differ in it are checked apart.
    So a batch is checked that the questions about masks wrongly take for one of a kind that has been.

    Args:
        facts: of the graph.
    """

    def __init__(self, facts: Facts) -> None:
        places = [n for n in facts.nodes if n.op == "placeholder"]
        self.dims = {k: d for k, n in enumerate(places) if (d := _dim_of_rows(n, facts)) is not None}

    def ask(self, questions: Questions, inputs: Sequence[Any]) -> None:
        """Ask it of the inputs of a step."""
        for k, dim in self.dims.items():
            value = inputs[k].detach().movedim(dim, -1)
            if value.numel():
                questions.ask(("flags", k), _zeros(value))

    def answers(self, questions: Questions) -> tuple[tuple[int, ...], ...]:
        """Of each such input whether some are 0, of the first row, of the last, all of a sample."""
        every = (questions.answer(("flags", k)) or [0] for k in self.dims)
        return tuple(tuple(where) if is_flag else () for is_flag, *where in every)


def _dim_of_rows(node: Node, facts: Facts) -> int | None:
    """The one dim of rows of what may be flags of rows, for all samples or for each."""
    if not tensors_of(node) or isinstance(tensors_of(node)[0], torch.nn.Parameter):
        return None
    value, shape = tensors_of(node)[0], shape_of(node)
    dims = [d for d, size in enumerate(shape) if size == facts.sequence]
    is_flag = len(dims) == 1 and len(shape) <= 2 and not (value.is_floating_point() or value.is_complex())
    return dims[0] if is_flag else None


def _zeros(value: Tensor) -> Tensor:
    """Of (..., T) ints: whether they are flags, whether some are 0, of the first row, of the last, all."""
    off = value == 0
    is_flag = ((value == 1) | off).all()
    return torch.stack([is_flag, off.any(), off[..., 0].any(), off[..., -1].any(), off.all(-1).any()])


class MaskQuestions:
    """Which masks are plain causal in a step, and in which of them a row may see nothing.

    Args:
        facts: of the graph.
        found: see `passes.s6_schedule.step_parts.masks_to_test`.
    """

    def __init__(self, facts: Facts, found: dict[Mask, bool]) -> None:
        self.known = {mask: mask_facts(facts, mask) for mask in found}
        self.additive = [mask for mask, additive in found.items() if additive]

    def ask(self, questions: Questions, fetch: Callable[[Node], Tensor]) -> None:
        """Ask it of this step's data; `fetch` gives the whole values that masks are made of."""
        self._ask_plain(questions, "plain", fetch)
        for mask, known in self.known.items():
            questions.ask(("open", mask), first_column_condition(known, fetch))

    def ask_where_it_counts(
        self, questions: Questions, fetch: Callable[[Node], Tensor], rows: Tensor
    ) -> None:
        """Ask the same of the rows alone that count.

        Args:
            fetch: gives the whole values that masks are made of.
            rows: (B,) or (1,), int64: how many rows of each sample count, see `Sweep`.
        """
        self._ask_plain(questions, "plain where it counts", fetch, rows)

    def _ask_plain(
        self, questions: Questions, name: str, fetch: Callable[[Node], Tensor], rows: Tensor | None = None
    ) -> None:
        for mask, known in self.known.items():
            if known.plain_without_data and not known.has_bias:
                questions.ask((name, mask), data_condition(known, fetch, rows))

    def plain(self, questions: Questions) -> frozenset[Mask]:
        """Masks that hide nothing but later rows."""
        return frozenset(m for m in self.known if questions.answer(("plain", m)) == [1])

    def plain_where_it_counts(self, questions: Questions) -> frozenset[Mask]:
        """Masks that hide nothing but later rows, and padding behind the rows that count."""
        return frozenset(m for m in self.known if questions.answer(("plain where it counts", m)) == [1])

    def full(self, questions: Questions) -> frozenset[Mask]:
        """Masks under which some row may attend to all columns, see NOTE [rows that see nothing]."""
        return self.empty_rows(questions).intersection(self.additive)

    def empty_rows(self, questions: Questions) -> frozenset[Mask]:
        """Masks that may leave a row nothing to see."""
        return frozenset(m for m in self.known if questions.answer(("open", m)) == [0])

    @cached_property
    def always_full(self) -> frozenset[Mask]:
        """Those masks of `full` for which it takes no data to tell: they are in every step."""
        fake = {m: first_column_condition(self.known[m], _fake_value) for m in self.additive}
        return frozenset(m for m, condition in fake.items() if condition is False)


def _fake_value(node: Node) -> Tensor:
    return tensors_of(node)[0]
