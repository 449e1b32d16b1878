"""The op for a recurrence: whole, step by step with a state, and its derivative."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from streambp_fx.measure.live_bytes import peak_live_bytes
from streambp_fx.passes.graph.ops import recurrence as R

ROWS, WIDTH = 11, 3


def scan(
    operands: Sequence[Tensor | None], settings: Sequence[float], state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """h = a h + s b, row by row; what comes out is h times a weight, in float32 at least."""
    a, b, weight = operands
    assert a is not None and b is not None
    h, made = torch.zeros_like(b[:, 0]) if state is None else state, []
    for k in range(b.shape[1]):
        h = a[:, k] * h + settings[0] * b[:, k]
        made.append(h if weight is None else h * weight)
    return torch.stack(made, 1), h


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    made = R.Recurrence("scan", scan, dims=(1, 1, None), rows=1, like=1, state=((1, 0), (1, 2)))
    monkeypatch.setitem(R.RECURRENCES, "scan", made)


def operands(weighted: bool = True) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *s: torch.randn(*s, dtype=torch.float64, generator=generator).requires_grad_()  # noqa: E731
    return [draw(2, ROWS, WIDTH), draw(2, ROWS, WIDTH), draw(WIDTH) if weighted else None]


def gradients(made: Tensor, given: list[Any]) -> list[Tensor]:
    weights = torch.linspace(0.5, 1.5, made.numel(), dtype=made.dtype).view(made.shape)
    return list(torch.autograd.grad((made * weights).sum(), [x for x in given if x is not None]))


@pytest.mark.parametrize("weighted", [True, False])
def test_whole_it_is_the_function(weighted: bool) -> None:
    given = operands(weighted)
    made, want = R.RECURRENCE("scan", given, [0.5], None), scan(given, [0.5], None)[0]
    assert made.equal(want)
    for a, b in zip(gradients(made, given), gradients(want, given), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=0)


def test_gradients_of_what_is_wanted_alone() -> None:
    a, b, weight = operands()
    made = R.RECURRENCE("scan", [a.detach(), b, weight.detach()], [0.5], None)  # type: ignore[union-attr]
    (found,) = gradients(made, [b])
    (want,) = gradients(scan([a, b, weight], [0.5], None)[0], [b])
    torch.testing.assert_close(found, want, rtol=1e-14, atol=0)


@pytest.mark.parametrize("rows", [1, 4, ROWS])
def test_step_by_step(rows: int) -> None:
    """Forwards with the state handed on, backwards with its gradient handed back."""
    given = operands()
    want = scan(given, [0.5], None)[0]
    expected = gradients(want, given)
    cotangent = torch.linspace(0.5, 1.5, want.numel(), dtype=want.dtype).view(want.shape)
    parts = [slice(k, k + rows) for k in range(0, ROWS, rows)]
    own = [[given[0][:, p].detach(), given[1][:, p].detach(), given[2].detach()] for p in parts]  # type: ignore[index,union-attr]
    states, made = [torch.zeros(2, WIDTH, dtype=torch.float64)], []
    for x in own:
        y, last = R.RECURRENCE_STEP("scan", x, [0.5], None, states[-1])
        states.append(last)
        made.append(y)
    torch.testing.assert_close(torch.cat(made, 1), want, rtol=1e-14, atol=0)
    found, total, gradient = [], torch.zeros(WIDTH, dtype=torch.float64), torch.zeros_like(states[0])
    for k in reversed(range(len(parts))):
        flags = [True, True, True]
        arguments = (own[k], [0.5], None, states[k], cotangent[:, parts[k]], gradient, flags)
        *rows_of, weight, gradient = R.RECURRENCE_VJP("scan", *arguments)
        found.insert(0, rows_of)
        total += weight
    joined = [torch.cat(x, 1) for x in zip(*found, strict=True)]
    for x, y in zip([*joined, total], expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-14)


def test_a_fake_tensor_tells_shape_and_dtype() -> None:
    with FakeTensorMode() as mode:
        given = [None if x is None else mode.from_tensor(x.float()) for x in operands()]
        made = R.RECURRENCE("scan", given, [0.5], None)
    assert made.shape == (2, ROWS, WIDTH) and made.dtype == torch.float32


def test_it_is_captured_as_one_op_for_all_lengths() -> None:
    given = operands()
    call = lambda *x: R.RECURRENCE("scan", list(x), [0.5], None)  # noqa: E731
    graph = make_fx(call, pre_dispatch=True, tracing_mode="symbolic")(*given).graph
    assert [n.target for n in graph.nodes if n.op == "call_function"] == [R.RECURRENCE]


def test_under_autocast_it_casts_as_the_function_does() -> None:
    seen = []

    def step(x: Any, settings: Any, state: Any) -> tuple[Tensor, Tensor]:
        made = x[0] @ x[1]
        seen.append(made.dtype)
        return made, x[1]

    R.RECURRENCES["scan"] = R.Recurrence("scan", step, dims=(1, None), rows=1, like=0, state=((1, 0), (1, 1)))
    x, w = torch.randn(2, 4, 4), torch.randn(4, 4)
    assert R.RECURRENCE("scan", [x, w], [], torch.bfloat16).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):  # what was captured outside runs as outside
        assert R.RECURRENCE("scan", [x, w], [], None).dtype == torch.float32
    assert seen == [torch.bfloat16, torch.float32]
    with FakeTensorMode() as mode, torch.autocast("cpu", torch.bfloat16):
        fakes = [mode.from_tensor(x), mode.from_tensor(w)]
        for cast, dtype in ((torch.bfloat16, torch.bfloat16), (None, torch.float32)):
            assert R.RECURRENCE("scan", fakes, [], cast).dtype == dtype


def test_a_meter_sees_what_it_makes_inside() -> None:
    given = [None if x is None else x.detach() for x in operands()]
    one = given[1].nbytes  # type: ignore[union-attr]
    assert peak_live_bytes(lambda: R.RECURRENCE("scan", given, [0.5], None)) > 1.5 * one
