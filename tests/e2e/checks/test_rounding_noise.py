"""What the self-check takes for rounding: noise, and products that are rougher where they have few rows."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from e2e_models import build, plain
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import streambp_fx
from streambp_fx import StreamBPWarning
from streambp_fx.checking.result import SelfCheck
from streambp_fx.checking.rounding import FewRows
from streambp_fx.checking.self_check import _Check
from streambp_fx.passes.s4_trace.evaluation import EMIT

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.bmm.default, aten.addmm.default, aten.addmm_.default, aten.mm.out)


class Rough(TorchDispatchMode):
    """A machine whose products are rounded to 13 bits where they have few rows."""

    only_observes = True  # so that the step is streamed under it
    few = 20

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in PRODUCTS and found.dtype == torch.float32 and found.shape[-2] <= self.few:
            found.view(torch.int32).bitwise_and_(~0x7FF)
        return found


def step_on(machine: bool) -> tuple[str, float]:
    """What the self-check says of a right model in float32, and the largest difference that it has seen."""
    model = build("llama", dtype=torch.float32)
    streambp_fx.transform(model, chunk=8, loss_chunk=8)
    result = _Check.result

    def on_it(check: _Check) -> SelfCheck:
        with Rough():
            return result(check)

    with pytest.MonkeyPatch.context() as patch:
        if machine:
            patch.setattr(_Check, "result", on_it)
        model(**plain(2, 33)).loss.backward()
    schedule = streambp_fx.schedule(model)
    assert schedule is not None and schedule.check is not None
    return schedule.check.status, schedule.check.difference


@pytest.mark.slow
def test_products_that_are_rougher_where_they_have_few_rows() -> None:
    """Twenty times what noise makes, and no more than what such products make."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", StreamBPWarning)
        status, smooth = step_on(False)
        assert status == "agrees" and smooth < 1e-5
        status, rough = step_on(True)
    assert status == "agrees" and rough > 1e-4


@pytest.mark.slow
def test_there_a_wrong_step_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What such products make does not hide what is wrong."""
    silu = aten.silu.default
    monkeypatch.setitem(EMIT, silu, lambda run, node, role: run.call(node, role, None) * 1.03)
    with pytest.warns(StreamBPWarning, match="self-check"):
        assert step_on(True)[0] == "differs"


@pytest.mark.slow
def test_without_such_products_it_would_be_a_false_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail."""
    monkeypatch.setattr(FewRows, "__torch_dispatch__", lambda self, f, t, a=(), k=None: f(*a, **(k or {})))
    with pytest.warns(StreamBPWarning, match="self-check"):
        assert step_on(True)[0] == "differs"


@pytest.mark.parametrize("call", ["linear", "matmul", "baddbmm", "inner"])
def test_the_same_products(call: str) -> None:
    """Values and gradients are those of one product, and no product has more rows than a piece."""
    torch.manual_seed(0)
    x = torch.randn(2, 25, 7, dtype=torch.float64, requires_grad=True)
    w = torch.randn(2, 7, 9, dtype=torch.float64, requires_grad=True)
    bias = nn.Parameter(torch.randn(9, dtype=torch.float64))

    def product() -> Tensor:
        if call == "linear":
            return torch.nn.functional.linear(x[:1], w[0].t(), bias)
        if call == "baddbmm":
            return torch.baddbmm(bias.expand(2, 25, 9), x, w)
        return x.transpose(1, 2) @ x if call == "inner" else x @ w

    seen: list[tuple[int, ...]] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            if func in PRODUCTS:
                seen.extend(tuple(v.shape) for v in args[-2:])
            return func(*args, **(kwargs or {}))

    leaves: list[Tensor] = [x, w, bias]
    value = product()
    wanted = torch.autograd.grad(value.sin().sum(), leaves, allow_unused=True)
    with Seen(), FewRows({25: 4}):
        again = product()
        found = torch.autograd.grad(again.sin().sum(), leaves, allow_unused=True)
    torch.testing.assert_close(again, value, rtol=1e-12, atol=1e-12)
    for a, b in zip(found, wanted, strict=True):
        assert (a is None) is (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    if call != "baddbmm":  # which is left as it is, and its backward is not
        assert seen and all(25 not in shape for shape in seen)


def test_noise_is_measured_with_them() -> None:
    """The pieces are those of the short step's rows."""
    pieces: list[Mapping[int, int]] = []
    enter = FewRows.__enter__

    def seen(self: FewRows) -> Any:
        pieces.append(self.pieces)
        return enter(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FewRows, "__enter__", seen)
        step_on(True)
    assert pieces and all(p in ({17: 3, 34: 3}, {12: 2, 36: 2}) for p in pieces)
