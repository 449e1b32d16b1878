"""recorded_steps: what is recorded of a recurrence's step gives its VJP, and how often the step is run."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

import streambp_fx
from benchmarks.families.configs import build
from streambp_fx.passes.graph.ops import recurrence as R
from streambp_fx.passes.s5_lower import recorded_steps
from streambp_fx.passes.s6_schedule import kept_states


def decay(
    operands: Sequence[Tensor | None], settings: Sequence[float], state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """h = sigmoid(a) h + b, row by row; exp(s h) comes out, which autograd keeps for itself."""
    a, b = operands
    assert a is not None and b is not None
    h, made = torch.zeros_like(b[:, 0]) if state is None else state, []
    for k in range(b.shape[1]):
        h = torch.sigmoid(a[:, k]) * h + b[:, k]
        made.append(h)
    return torch.exp(settings[0] * torch.stack(made, 1)), h


@pytest.mark.parametrize("wanted", [[True, True], [False, True]])
def test_a_record_gives_the_same_gradients(monkeypatch: pytest.MonkeyPatch, wanted: list[bool]) -> None:
    """Also if what was returned is written over, and the state after, beside the one before."""
    monkeypatch.setitem(R.RECURRENCES, "decay", R.Recurrence("decay", decay, (1, 1), 1, 1, ((1, 0), (1, 2))))
    torch.manual_seed(0)
    a, b, made, last = (torch.randn(2, 7, 3, dtype=torch.float64) for _ in range(4))
    states = torch.randn(2, 2, 3, dtype=torch.float64)
    before, given = states[0], ("decay", [a, b], [0.3], None, states[0])
    with torch.no_grad():
        rows, after = R.RECURRENCE_STEP(*given)
        want = R.RECURRENCE_VJP(*given, made, last[:, 0], wanted)
        own_rows, own_after, record = R.RECURRENCE_KEPT(*given, wanted)
        assert own_rows.equal(rows) and own_after.equal(after)
        own_rows.mul_(3.0)
        states[1].copy_(own_after)
        own_after.zero_()
        found = R.RECURRENCE_KEPT_VJP(*given, made, last[:, 0], wanted, record)
    assert len(found) == len(want) == sum(wanted) + 1
    for x, y in zip(found, want, strict=True):
        assert torch.equal(x, y)
    assert before.requires_grad is False


class Calls:
    """How often the step of each recurrence is called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count: Counter[str] = Counter()
        for name, known in list(R.RECURRENCES.items()):
            counted = dataclasses.replace(known, step=self._counted(name, known.step))
            monkeypatch.setitem(R.RECURRENCES, name, counted)

    def _counted(self, name: str, step: Any) -> Any:
        def call(*given: Any) -> Any:
            self.count[name] += type(given[0][0]) is Tensor  # not where its dtypes are asked for
            return step(*given)

        return call


def gradients(model: Any, ids: Tensor) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("recorded", [True, False])
def test_a_step_runs_it_three_times_a_chunk(monkeypatch: pytest.MonkeyPatch, recorded: bool) -> None:
    """Forwards, for the states of the backward, and before its VJP, but not once more within that."""
    if not recorded:
        monkeypatch.setattr(recorded_steps, "MORE", -1.0)
    torch.manual_seed(0)
    model = build("mamba2").double()
    ids = torch.randint(0, 100, (2, 77))
    streamed = streambp_fx.transform(model, chunk=32, check="never")
    first = gradients(streamed, ids)
    calls = Calls(monkeypatch)
    second = gradients(streamed, ids)
    chunks, layers = 3, model.config.num_hidden_layers
    assert len(calls.count) == 2  # the convolution before the scan is one
    assert set(calls.count.values()) == {(3 if recorded else 4) * chunks * layers}
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow
def test_twice_where_its_states_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the first layer, which is run again together with the table in front of it."""
    torch.manual_seed(0)
    model, ids = build("mamba2").double(), torch.randint(0, 100, (2, 77))
    found = []
    for share, runs in ((0, 3), (100, 2)):
        monkeypatch.setattr(kept_states, "SMALL", Fraction(share))
        streamed = streambp_fx.transform(copy.deepcopy(model), chunk=32, check="never")
        gradients(streamed, ids)
        calls = Calls(monkeypatch)
        found.append(gradients(streamed, ids))
        chunks, layers = 3, model.config.num_hidden_layers
        assert set(calls.count.values()) == {(runs * (layers - 1) + 3) * chunks}
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
