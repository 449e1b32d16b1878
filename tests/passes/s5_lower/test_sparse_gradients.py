"""Gradients of losses that read a few elements of a row: the same values, with one wide tensor, not two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import streambp_fx.passes.s5_lower.sparse_gradients  # noqa: F401  (registers its rewrites)
from streambp_fx.passes.cost.program import program_cost
from streambp_fx.passes.s5_lower.simplify import simplify
from streambp_fx.passes.s5_lower.write_in_place import write_in_place

T = torch.Tensor
aten = torch.ops.aten
ROWS, WIDTH, WORDS = 7, 3, 37
GENERIC = aten._log_softmax_backward_data


def cross_entropy(scores: T, words: T) -> T:
    return F.cross_entropy(scores, words, reduction="none")


def cross_entropy_ignoring_a_word(scores: T, words: T) -> T:
    return F.cross_entropy(scores, words.clamp_min(0), reduction="none", ignore_index=5)


def gathered(scores: T, words: T) -> T:
    chosen = words.clamp_min(0)
    return scores.view(1, ROWS, WORDS).log_softmax(-1).gather(-1, chosen.view(1, ROWS, 1)).view(ROWS)


def several_gathered(scores: T, words: T) -> T:
    """One of them twice: its values are added."""
    places = torch.stack([words.clamp_min(0), words.clamp_min(0), torch.full_like(words, 3)], 1)
    return (scores.log_softmax(1).gather(1, places) * torch.tensor([1.0, 2.0, -0.5])).sum(1)


def without_log_softmax(scores: T, words: T) -> T:
    """The log-probability of a word as trainers write it to save memory."""
    return scores.gather(1, words.clamp_min(0)[:, None]).squeeze(1) - scores.logsumexp(1)


def weights_of_words(scores: T, words: T) -> T:
    weight = torch.linspace(0.5, 2, WORDS, dtype=scores.dtype)
    return F.cross_entropy(scores, words, weight, reduction="none")


def smoothed(scores: T, words: T) -> T:
    return F.cross_entropy(scores, words, reduction="none", label_smoothing=0.1)


def whole_row(scores: T, words: T) -> T:
    return scores.log_softmax(1).exp().square().sum(1)


def probabilities_too(scores: T, words: T) -> T:
    """The log-probabilities are read after their gradient could have taken their place."""
    logs = scores.log_softmax(1)
    return logs.gather(1, words.clamp_min(0)[:, None]).squeeze(1) * logs.exp().square().sum(1)


SPARSE = [cross_entropy, cross_entropy_ignoring_a_word, gathered, several_gathered]
OTHERS = [without_log_softmax, weights_of_words, smoothed, whole_row, probabilities_too]


def inputs(dtype: torch.dtype = torch.float64) -> tuple[T, T, T, T]:
    """Rows, the head's weight, words (two rows have none) and a cotangent."""
    generator = torch.Generator().manual_seed(7)
    rows, head = (torch.randn(n, WIDTH, dtype=torch.float64, generator=generator) for n in (ROWS, WORDS))
    words = torch.tensor([36, 0, -100, 5, 5, -100, 12])
    cotangent = torch.randn(ROWS, dtype=torch.float64, generator=generator)
    return rows.to(dtype), head.to(dtype), words, cotangent.to(dtype)


def gradients(loss: Callable[[T, T], T]) -> Callable[..., tuple[T, ...]]:
    """Losses of rows, and the gradients of rows and head."""

    def run(rows: T, head: T, words: T, cotangent: T) -> tuple[T, ...]:
        values, pullback = torch.func.vjp(lambda r, h: loss(r @ h.t(), words), rows, head)
        with torch.no_grad():
            return values, *pullback(cotangent)

    return run


def program(loss: Callable[[T, T], T], dtype: torch.dtype, rewritten: bool) -> GraphModule:
    module = make_fx(gradients(loss), tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs(dtype))
    if rewritten:
        simplify(module.graph)
    module.graph.eliminate_dead_code()
    write_in_place(module.graph)
    module.recompile()
    return module


def ops(module: GraphModule) -> set[Any]:
    return {getattr(n.target, "overloadpacket", None) for n in module.graph.nodes}


def check(loss: Callable[[T, T], T], dtype: torch.dtype = torch.float64) -> tuple[GraphModule, GraphModule]:
    given = inputs(dtype)
    before, after = program(loss, dtype, False), program(loss, dtype, True)
    want = gradients(loss)(*(v.double() if v.is_floating_point() else v for v in given))
    got = after(*(v.clone() for v in given))
    tolerance = {torch.float64: 1e-13, torch.float32: 2e-6}.get(dtype, 0.1)
    for a, b in zip(want, got, strict=True):
        assert b.dtype == dtype
        torch.testing.assert_close(b.double(), a, rtol=tolerance, atol=tolerance)
    narrow = 2 * ROWS * dtype.itemsize  # what has one element a row may be kept for longer
    assert program_cost(after, {}).peak <= program_cost(before, {}).peak + narrow, "the peak grew"
    return before, after


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("loss", SPARSE, ids=lambda f: f.__name__)
def test_one_wide_tensor(loss: Callable[[T, T], T], dtype: torch.dtype) -> None:
    before, after = check(loss, dtype)
    assert GENERIC in ops(before) and GENERIC not in ops(after)
    wide = ROWS * WORDS * dtype.itemsize
    peaks = [int(program_cost(m, {}).peak) for m in (before, after)]
    assert peaks[0] >= 2 * wide, peaks
    assert peaks[1] < 2 * wide, f"{peaks[1]} bytes, and logits have {wide}"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loss", [*SPARSE, *OTHERS], ids=lambda f: f.__name__)
def test_values_and_peak(loss: Callable[[T, T], T], dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and loss is several_gathered:
        pytest.skip("promotes to float32")
    check(loss, dtype)


@pytest.mark.parametrize("loss", [weights_of_words, smoothed, whole_row], ids=lambda f: f.__name__)
def test_dense_gradients_are_left_as_they_are(loss: Callable[[T, T], T]) -> None:
    before, after = check(loss)
    assert GENERIC in ops(before) and GENERIC in ops(after)


def test_rows_that_are_ignored_have_no_gradient() -> None:
    rows, head, words, cotangent = inputs()
    _, found, _ = program(cross_entropy, torch.float64, True)(rows, head, words, cotangent)
    assert (found[words == -100] == 0).all() and (found[words != -100] != 0).all()


def test_sum_with_a_few_elements_needs_no_zeros() -> None:
    _, after = check(without_log_softmax)
    assert aten.new_zeros not in ops(after) and aten.scatter_add_ in ops(after)


def test_a_gradient_that_is_returned_as_well_is_made() -> None:
    """Zeros with a few values, read twice: they are a tensor of their own."""

    def run(x: T, places: T, values: T) -> tuple[T, T]:
        spread = x.new_zeros(x.shape).scatter_add(1, places, values)
        return spread, x.exp() + spread

    given = torch.randn(4, 5), torch.tensor([[1], [0], [4], [1]]), torch.randn(4, 1)
    module = make_fx(run, tracing_mode="fake")(*given)
    simplify(module.graph)
    module.recompile()
    assert all(torch.equal(a, b) for a, b in zip(run(*given), module(*given), strict=True))


@pytest.mark.parametrize("width", [1, 5, 16, 37, 1000, 4099])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_log_softmax_over_its_operand_has_the_same_bits(width: int, dtype: torch.dtype) -> None:
    def run(x: T, y: T) -> T:
        return torch.ops.aten._log_softmax(x * y, 1, False)

    given = tuple(torch.randn(9, width, dtype=torch.float64).to(dtype) * 3 for _ in range(2))
    module = make_fx(run, tracing_mode="fake")(*given)
    write_in_place(module.graph)
    module.recompile()
    assert aten._log_softmax.out in {n.target for n in module.graph.nodes}
    kept = tuple(v.clone() for v in given)
    assert torch.equal(module(*given), run(*kept))
    assert all(torch.equal(a, b) for a, b in zip(given, kept, strict=True))


def test_log_softmax_of_an_input_or_along_another_dim_is_not_written_over_it() -> None:
    given = (torch.randn(4, 6), torch.randn(4, 6))
    for run in (
        lambda x, y: torch.ops.aten._log_softmax(x, 1, False) + y,
        lambda x, y: torch.ops.aten._log_softmax(x * y, 0, False) + y,
    ):
        module = make_fx(run, tracing_mode="fake")(*given)
        write_in_place(module.graph)
        module.recompile()
        assert aten._log_softmax.out not in {n.target for n in module.graph.nodes}
        torch.testing.assert_close(module(*given), run(*given))
