"""Sizes that become different, or very small, between calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from adversaries.calls import Keeping
from adversaries.situations import Crossing, finite, plain
from e2e_adversary import Record, tokens
from e2e_check import assert_streamed
from e2e_models import sample
from e2e_subject import Subject
from test_calls import every, exact

from streambp_fx.transform import schedules


def crossing(*lengths: tuple[int, int]) -> Any:
    def run(m: Any, call: Any, record: Record) -> None:
        for rows, columns in lengths:
            encoded = m.table[:columns].detach().expand(2, -1, -1).clone().requires_grad_()
            record.step(m, call, tokens(2, rows), encoded)
            record("encoded", encoded.grad)

    return run


CROSSING = {
    "equal at first": ((33, 33), (20, 33), (33, 17), (20, 20)),
    "different at first": ((33, 17), (20, 20), (12, 33)),
}


@pytest.mark.parametrize(("name", "door"), every(CROSSING, ("equal at first", "transform")))
def test_two_inputs(name: str, door: str) -> None:
    model, _ = exact(Crossing, crossing(*CROSSING[name]), door)
    if door == "transform":
        assert any(s.chunked for each in schedules(model) or () for s in each.segments)


EMPTY = {
    "one token": ((2, 1), (2, 33), (2, 1)),
    "no token": ((2, 33), (2, 0), (0, 0), (2, 20)),
    "no sample": ((0, 33), (2, 33), (0, 12)),
    "one of one": ((1, 1), (1, 33)),
}


@pytest.mark.parametrize(("name", "door"), every(EMPTY, ("no token", "compile")))
def test_next_to_nothing(name: str, door: str) -> None:
    def run(m: Any, call: Any, record: Record) -> None:
        for batch, length in EMPTY[name]:
            record.step(m, call, tokens(batch, length))

    exact(lambda: Subject(plain, finite), run, door)


@pytest.mark.parametrize("door", sample(["transform", "compile"], "compile"))
def test_a_lone_integer(door: str) -> None:
    """Also where it is 0, 1, and as many as the tokens: then the head reads what the layer keeps."""

    def run(m: Any, call: Any, record: Record) -> None:
        for keep in (5, 7, 0, 1, 33, 9):
            record.step(m, call, tokens(2, 33), keep)

    exact(Keeping, run, door)


@pytest.mark.parametrize("door", sample(["transform", "compile"], "transform"))
def test_ids_in_any_layout(door: str) -> None:
    def run(m: Any, call: Any, record: Record) -> None:
        for ids in (tokens(33, 2).T, tokens(4, 66)[::2, ::2], tokens(1, 33).expand(3, -1)):
            record.step(m, call, ids)

    model, warned = exact(lambda: Subject(plain), run, door)
    assert_streamed(model)
    assert not warned


def test_sizes_that_were_constants_are_compared() -> None:
    """As many samples as tokens: the batch size was a number to that graph."""

    def run(m: Any, call: Any, record: Record) -> None:
        for batch, length in ((9, 9), (10, 9), (9, 10), (3, 21)):
            torch.manual_seed(0)
            record.step(m, call, tokens(batch, length))

    exact(lambda: Subject(plain), run, "compile")
