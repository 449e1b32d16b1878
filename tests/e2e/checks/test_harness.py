"""The harness itself: right stand-ins for the compiler pass, wrong ones fail."""

from __future__ import annotations

import functools
from dataclasses import replace

import e2e_blame
import pytest
import torch
from e2e_check import assert_close_grads, check_exact
from e2e_models import build, padded, plain, true_double
from e2e_standin import RIGHT, WRONG

from streambp_fx.passes.s4_trace import prefix_attention
from streambp_fx.passes.s5_lower import lower

LLAMA = functools.partial(build, "llama")
ONE_LAYER = functools.partial(build, "llama", num_hidden_layers=1)
BATCHES = {"plain": plain(2, 67), "padded": padded(67, "right")}


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_right_passes(name: str, dtype: torch.dtype) -> None:
    eager, _ = check_exact(functools.partial(LLAMA, dtype=dtype), BATCHES, streamer=RIGHT[name])
    assert all(p.grad is not None for p in eager.parameters())


@pytest.mark.parametrize("name", WRONG)
def test_wrong_fails(name: str) -> None:
    with pytest.raises(AssertionError, match=r"gradients differ|loss"):
        check_exact(LLAMA, BATCHES, streamer=WRONG[name])


@pytest.fixture
def few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer passes are switched off one by one: each is a compilation."""
    assert "reorder" in e2e_blame.OPTIONAL and len(e2e_blame.OPTIONAL) > 5
    monkeypatch.setattr(e2e_blame, "OPTIONAL", ["reorder"])


@pytest.mark.slow
@pytest.mark.parametrize("check", ["first", "never"])
@pytest.mark.usefixtures("few_passes")
def test_a_failure_names_the_pass_to_blame(monkeypatch: pytest.MonkeyPatch, check: str) -> None:
    """Whether the self-check finds it, or the comparison of gradients: a pass over programs that is wrong."""

    def wrong(lowering: lower.Lowering, settings: lower.LoweringSettings) -> lower.Lowering:
        lowering = reorder.run(lowering, settings)
        for node in lowering.module.graph.find_nodes(op="call_function", target=torch.ops.aten.silu.default):
            node.target = torch.ops.aten.relu.default
        lowering.module.recompile()
        return lowering

    (reorder,) = (p for p in lower.PROGRAM_PASSES if p.name == "reorder")
    passes = tuple(replace(p, run=wrong) if p is reorder else p for p in lower.PROGRAM_PASSES)
    monkeypatch.setattr(lower, "PROGRAM_PASSES", passes)
    with pytest.raises(AssertionError, match=r"It is right without the pass 'reorder'\.$"):
        check_exact(ONE_LAYER, {"plain": plain(2, 20)}, check=check)


@pytest.mark.slow
@pytest.mark.usefixtures("few_passes")
def test_a_failure_of_chunks_alone_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The columns before a chunk are forgotten in the backward."""
    monkeypatch.setattr(prefix_attention, "_pieces", lambda prefix, pieces: [])
    with pytest.raises(AssertionError, match=r"It is right in one chunk: what was proved of rows"):
        check_exact(ONE_LAYER, {"plain": plain(2, 20)}, check="never")


@pytest.mark.parametrize("error", [float("nan"), float("inf"), 1e-6])
def test_one_bad_entry_fails(error: float) -> None:
    want = {"a": torch.ones(50, dtype=torch.float64), "b": torch.ones(2, dtype=torch.float64)}
    got = {n: w.clone() for n, w in want.items()}
    assert_close_grads(got, want, 1e-9)
    got["a"][7] += error
    with pytest.raises(AssertionError, match=r"1 of 2 gradients differ"):
        assert_close_grads(got, want, 1e-9)


def test_none_is_not_zero() -> None:
    want = {"a": torch.ones(2), "b": None}
    with pytest.raises(AssertionError, match=r"streamed has a gradient"):
        assert_close_grads({"a": torch.ones(2), "b": torch.zeros(2)}, want, 1e-9)


def test_the_floor_is_rounding_only() -> None:
    """A gradient that vanishes beside the whole is held to rounding of the whole, not to nothing."""
    want = {"big": torch.ones(1, dtype=torch.float64), "noise": torch.full((1,), 1e-18, dtype=torch.float64)}
    assert_close_grads({**want, "noise": -want["noise"]}, want, 1e-9)
    with pytest.raises(AssertionError):
        assert_close_grads({**want, "noise": want["noise"] + 1e-13}, want, 1e-9)


@pytest.mark.parametrize("family", ["llama", "gemma2", "bloom", "gpt2"])
def test_true_double(family: str) -> None:
    """It removes the float32 islands, Dynamo sees what eager sees, and all is put back."""
    model, batch = build(family), plain(2, 67)
    shipped = model(**batch).loss.detach()
    with true_double(model):
        loss = model(**batch).loss.detach()
        compiled = torch.compile(lambda **kw: model.forward(**kw).logits, backend="eager")(**batch)
        exact = model(**batch).logits
    assert (shipped.dtype, loss.dtype) == (torch.float32, torch.float64)
    assert 0 < abs(float(loss) - float(shipped)) < 1e-5
    assert (compiled - exact).norm() <= 1e-14 * exact.norm()
    assert model(**batch).loss.equal(shipped)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_true_double_against_finite_differences(family: str) -> None:
    """Eager's own gradient in true double is right to far below float32: the yardstick is straight."""
    model, batch = build(family), plain(2, 40)
    with true_double(model):
        model(**batch).loss.backward()
        gen = torch.Generator().manual_seed(3)
        direction = [torch.randn(p.shape, generator=gen, dtype=p.dtype) for p in model.parameters()]
        slope = sum(float((p.grad * d).sum()) for p, d in zip(model.parameters(), direction, strict=True))
        ends = []
        with torch.no_grad():
            for sign in (1, -2):
                torch._foreach_add_(list(model.parameters()), direction, alpha=sign * 1e-6)
                ends.append(float(model(**batch).loss))
    assert abs((ends[0] - ends[1]) / 2e-6 - slope) <= 1e-7 * abs(slope)
