"""Compare a streamed step with the eager one: loss, every gradient, and what has none."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from e2e_blame import WRONG, blame
from e2e_models import CHUNK, LOSS_CHUNK, true_double
from torch import nn

import streambp_fx

Transform = Callable[..., Any]
Grads = dict[str, "torch.Tensor | None"]
RTOL = {torch.float64: 1e-9, torch.float32: 1e-5}

# What rounding alone may leave in a gradient that is small beside the whole: as eager's own roundings
# are of the size of eps times the largest terms. A key bias under softmax, for one, has the gradient 0
# and eager returns noise for it.
FLOOR = {torch.float64: 32 * torch.finfo(torch.float64).eps}
FLOOR |= {d: torch.finfo(d).eps for d in (torch.float32, torch.bfloat16, torch.float16)}


# The passes over a graph, in order.
GRAPH_PASSES = [
    "capture",
    "autocast",
    "normalize",
    "trained_bias",
    "branches",
    "row_selections",
    "axes",
    "footprints",
    "widen_late",
]
GRAPH_PASSES += ["lazy_outputs", "segment", "signatures"]


def transform(model: Any, **options: Any) -> Any:
    """streambp_fx.transform with small chunks."""
    options = {"chunk": CHUNK, "loss_chunk": LOSS_CHUNK, **options}
    return streambp_fx.transform(model, **options)


def through(door: str, model: nn.Module) -> Any:
    """What streams a model of `input_ids` in chunks of 8: transformed, or compiled (door "compile")."""
    if door == "transform":
        return streambp_fx.transform(model, chunk=8)
    options = {"chunk": 8, "seq_dim": {"input_ids": 1}}
    return torch.compile(model, backend="streambp", options=options)


def restore(model: Any) -> Any:
    return streambp_fx.restore(model)


def grads(model: nn.Module) -> Grads:
    return {n: None if p.grad is None else p.grad.detach().clone() for n, p in model.named_parameters()}


def step(model: Any, batch: Mapping[str, Any], scale: float = 1.0) -> tuple[torch.Tensor, Grads]:
    """Loss and gradients of one step from clean gradients."""
    model.zero_grad(set_to_none=True)
    loss = model(**batch).loss
    (loss * scale).backward()
    return loss.detach(), grads(model)


def assert_close_grads(got: Grads, want: Grads, rtol: float, where: str = "") -> None:
    """Per parameter: L2 relative, with the floor of rounding for those that vanish."""
    assert got.keys() == want.keys()
    total = math.sqrt(sum(float(w.double().square().sum()) for w in want.values() if w is not None))
    assert math.isfinite(total) and total > 0, f"{where}: eager's own gradients are of no use ({total})"
    wrong = []
    for name, want_g in want.items():
        got_g = got[name]
        if want_g is None or got_g is None:
            if want_g is not got_g:
                has, lacks = ("streamed", "eager") if want_g is None else ("eager", "streamed")
                wrong.append(f"{name}: {has} has a gradient, {lacks} has none")
            continue
        assert got_g.dtype == want_g.dtype and got_g.shape == want_g.shape, f"{where}: {name}"
        error, norm = float((got_g.double() - want_g.double()).norm()), float(want_g.double().norm())
        allowed = max(rtol * norm, FLOOR[want_g.dtype] * total)
        if not error <= allowed:  # so that nan is wrong as well
            wrong.append(f"{name}: error {error:.3e}, allowed {allowed:.3e}, norm {norm:.3e} of {total:.3e}")
    assert not wrong, f"{where}: {len(wrong)} of {len(want)} gradients differ\n" + "\n".join(wrong[:12])


def assert_close_loss(got: torch.Tensor, want: torch.Tensor, rtol: float, where: str = "") -> None:
    assert got.dtype == want.dtype and got.shape == want.shape, f"{where}: {got} against {want}"
    assert torch.isfinite(want), f"{where}: eager's own loss is {want}"
    assert abs(float(got) - float(want)) <= rtol * abs(float(want)), (
        f"{where}: loss {float(got):.12g}, eager {float(want):.12g}"
    )


def pair(factory: Callable[[], Any], streamer: Transform | None = None, **options: Any) -> tuple[Any, Any]:
    """(eager, streamed): two models with equal weights."""
    eager = factory()
    streamed = copy.deepcopy(eager)
    out = (streamer or transform)(streamed, **options)
    assert out is streamed, "transform returns the model it was given"
    return eager, streamed


def compare(
    eager: Any, streamed: Any, batches: Mapping[str, Any], rtol: float, unchunked: int | None = 0
) -> None:
    """Every batch on the same two models.

    Args:
        unchunked: how many segments run whole because the compiler cannot chunk them; None: nobody asks.
    """
    compare_steps(eager, streamed, batches, rtol)
    if unchunked is not None:
        assert_streamed(streamed, unchunked)


def compare_steps(eager: Any, streamed: Any, batches: Mapping[str, Any], rtol: float) -> None:
    """Loss and gradients of every batch on the same two models."""
    for name, batch in batches.items():
        want_loss, want = step(eager, batch)
        got_loss, got = step(streamed, batch)
        assert_close_loss(got_loss, want_loss, rtol, name)
        assert_close_grads(got, want, rtol, name)


@contextlib.contextmanager
def in_double(factory: Callable[[], Any]) -> Iterator[None]:
    """Within: float64 throughout, if the factory makes float64 models."""
    model = factory()
    if next(model.parameters()).dtype != torch.float64:
        yield
        return
    with true_double(model):
        yield


def check_exact(
    factory: Callable[[], Any],
    batches: Mapping[str, Any],
    rtol: float | None = None,
    streamer: Transform | None = None,
    unchunked: int | None = 0,
    **options: Any,
) -> tuple[Any, Any]:
    """Streamed equals eager on all batches, and is streamed. Returns both models for further questions.

    A step that is wrong is run in other ways, to name the pass that is to blame.
    """

    def check(**others: Any) -> tuple[Any, Any]:
        eager, streamed = pair(factory, streamer, **{**options, **others})
        dtype = next(eager.parameters()).dtype
        compare_steps(eager, streamed, batches, RTOL[dtype] if rtol is None else rtol)
        return eager, streamed

    with in_double(factory):
        try:
            eager, streamed = check()
        except WRONG as error:
            if streamer is not None:
                raise
            raise AssertionError(f"{error}\n{blame(check)}") from error
        if unchunked is not None and streamer is None:
            assert_streamed(streamed, unchunked)
    return eager, streamed


def total_error(runs: Iterable[tuple[Grads, Grads]]) -> float:
    """L2 distance over all parameters and runs."""
    return math.sqrt(
        sum(
            float((a.double() - b.double()).square().sum())  # type: ignore[union-attr]
            for x, y in runs
            for a, b in zip(x.values(), y.values(), strict=True)
            if b is not None
        )
    )


def assert_streamed(model: Any, unchunked: int = 0) -> None:
    """The graph that was compiled last is streamed, but for so many segments."""
    schedule = streambp_fx.schedule(model)
    assert schedule is not None, "nothing was streamed"
    left = [s for s in schedule.segments if not s.chunked]
    assert len(left) == unchunked and len(left) < len(schedule.segments), str(schedule)


def assert_all_chunked(model: Any, at_least: int = 2) -> None:
    """The last step was streamed: no region fell back, and there are as many segments as layers."""
    schedule = streambp_fx.schedule(model)
    left = [f"{s.kind}: {s.reason}" for s in schedule.segments if not s.chunked]
    assert not left, f"not chunked: {left}\n{schedule}"
    assert len(schedule.segments) >= at_least, str(schedule)
