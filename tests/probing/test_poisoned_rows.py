"""Poisoned rows: which are replaced, by what, and that a difference is found where it is."""

import pytest
import torch

from streambp_fx.probing.poisoned_rows import Operand, Poison, Rows, first_difference


@pytest.mark.parametrize(
    ("shape", "rows"),
    [((2, 7, 3), Rows(1, 1, 7, 1)), ((14, 3), Rows(0, 2, 7, 1)), ((2, 21), Rows(1, 1, 7, 3))],
    ids=["a dim of its own", "merged with what is before", "merged with what is after"],
)
@pytest.mark.parametrize("kind", list(Poison))
def test_rows_are_replaced_and_put_back(shape, rows, kind):
    clean = torch.arange(42.0).add(1).view(shape)
    operand = Operand(clean, rows, seed=0)
    operand.poison(5, 9, kind)
    changed = (operand.buffer != clean).view(2, 7, 3)
    assert changed[:, 5:].all() and not changed[:, :5].any()
    assert bool(operand.buffer.isfinite().all()) is (kind is not Poison.NAN)
    assert first_difference(clean, operand.buffer, rows, 0, 5) is None
    found = first_difference(clean, operand.buffer, rows, 3, 7)
    assert found == ("5 became NaN" if kind is Poison.NAN else "5 changed")
    operand.restore(5, 9)
    assert torch.equal(operand.buffer, clean)


def test_integers_are_those_of_other_rows_and_booleans_are_turned():
    ids = torch.arange(60).view(2, 30)
    operand = Operand(ids, Rows(1, 1, 30, 1), seed=0)
    operand.poison(10, 30, Poison.NAN)
    poisoned = operand.buffer[:, 10:]
    assert (poisoned != ids[:, 10:]).float().mean() > 0.5
    assert set(operand.buffer[0].tolist()) <= set(range(30)), "never out of the range of their sequence"
    flags = Operand(torch.tensor([[True, False, True]]), Rows(1, 1, 3, 1), seed=0)
    flags.poison(1, 3, Poison.NAN)
    assert flags.buffer.tolist() == [[True, True, False]]


def test_zeros_of_either_sign_and_nan_where_it_was_are_equal():
    rows = Rows(0, 1, 3, 1)
    expected = torch.tensor([0.0, float("nan"), 1.0])
    assert first_difference(expected, torch.tensor([-0.0, float("nan"), 1.0]), rows, 0, 3) is None
    assert first_difference(expected, torch.tensor([0.0, 2.0, 1.0]), rows, 0, 3) == "1 changed"


def test_a_copy_that_lies_otherwise_in_memory_is_not_faithful():
    value = torch.randn(4, 6)
    assert Operand(value.t(), Rows(0, 1, 6, 1), 0).faithful
    assert not Operand(value[:, ::2], Rows(0, 1, 4, 1), 0).faithful
    assert not Operand(value[1:], Rows(0, 1, 3, 1), 0).faithful


def test_the_random_state_is_not_touched():
    before = torch.get_rng_state()
    Operand(torch.randn(3, 4, generator=torch.Generator()), Rows(0, 1, 3, 1), 0).poison(0, 2, Poison.NUMBERS)
    assert torch.equal(torch.get_rng_state(), before)
