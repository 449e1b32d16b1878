"""Exactness, family by family: one transformed model meets every kind of batch."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from e2e_check import (
    assert_all_chunked,
    assert_close_grads,
    assert_close_loss,
    check_exact,
    pair,
    step,
    total_error,
    transform,
)
from e2e_models import (
    CHUNK,
    FAMILIES,
    HEAD,
    HIDDEN,
    OTHER_FAMILIES,
    VOCAB,
    build,
    impls,
    padded,
    plain,
    sample,
)

# Their modelling code fails in float64 (xglm: torch.full with float64's minimum and no dtype).
FLOAT32_ONLY = ("xglm",)
FIRST = [(family, impls(family)[0]) for family in FAMILIES]
SECOND = [(family, impl) for family in FAMILIES for impl in impls(family)[1:]]
MOST = ("T=67, a ragged last chunk", "T=4*chunk+1, a tail of one row", "T=hidden size", "left padding")
MOST += ("right padding",)  # of more than a chunk: test_ragged.py, and all families in test-all


def lengths() -> dict[str, dict[str, torch.Tensor]]:
    """Batch 2, no mask: lengths that collide with other sizes, and ragged ends."""
    return {
        "T=67, a ragged last chunk": plain(2, 67),
        "T=11, less than a chunk": plain(2, 11),
        "T=head size": plain(2, HEAD),
        "T=hidden size": plain(2, HIDDEN),
        "T=vocabulary": plain(2, VOCAB),
        "T=batch size": plain(2, 2),
        "T=chunk": plain(2, CHUNK),
        "T=4*chunk+1, a tail of one row": plain(2, 4 * CHUNK + 1),
    }


def masked() -> dict[str, dict[str, torch.Tensor]]:
    """Batch 2 with an attention mask."""
    return {
        "right padding": padded(67, "right"),
        "left padding": padded(67, "left"),
        "left padding of more than a chunk": padded(67, "left", pads=(29, 0)),
        "right padding of more than a chunk": padded(65, "right", pads=(40, 3)),
        "right padding, labels on padding too": padded(67, "right", label_pads=True),
        "left padding, labels on padding too": padded(67, "left", label_pads=True),
        "a mask of ones": padded(67, "right", pads=(0, 0)),
    }


@pytest.mark.parametrize(("family", "impl"), sample([*FIRST, *SECOND]))
def test_float64(family: str, impl: str) -> None:
    """Ragged ends, a tail of one row, a length that is another size as well, padding on both sides."""
    batches = {n: b for n, b in {**lengths(), **masked()}.items() if n in MOST}
    _, streamed = check_exact(functools.partial(build, family, impl), batches)
    assert_all_chunked(streamed)


@pytest.mark.parametrize("family", sample(FAMILIES, "llama"))
def test_float64_on_every_kind_of_batch(family: str) -> None:
    _, streamed = check_exact(functools.partial(build, family), {**lengths(), **masked()})
    assert_all_chunked(streamed)


@pytest.mark.parametrize("family", sample(["llama", "gemma2", "bloom", "falcon"], "falcon"))
def test_one_sample(family: str) -> None:
    _, streamed = check_exact(
        functools.partial(build, family), {"batch 1": plain(1, 67), "T=17": plain(1, 17)}
    )
    assert_all_chunked(streamed)


@pytest.mark.slow
@pytest.mark.parametrize("family", sample(FAMILIES))
def test_float32(family: str) -> None:
    factory = functools.partial(build, family, dtype=torch.float32)
    batches = {"T=67": plain(2, 67), "T=97": plain(2, VOCAB)}
    _, streamed = check_exact(factory, batches, rtol=1e-5)
    assert_all_chunked(streamed)


HALF = ["llama", "qwen3", "gemma2", "gpt_neox", "bloom", "opt", "gpt2"]


@pytest.mark.parametrize("family", sample(HALF))
def test_bfloat16(family: str) -> None:
    """No further from the float32 gradient of the same weights than 1.1 times eager bfloat16 is.

    Six batches together, because the error of one small batch is a handful of roundings and
    its ratio of two runs scatters by itself.
    """
    eager, streamed = pair(functools.partial(build, family, dtype=torch.bfloat16))
    exact = build(family, dtype=torch.bfloat16).float()
    batches = [plain(2, 67, seed) for seed in range(6)]
    truth = [step(exact, b)[1] for b in batches]
    eager_error = total_error(zip([step(eager, b)[1] for b in batches], truth, strict=True))
    error = total_error(zip([step(streamed, b)[1] for b in batches], truth, strict=True))
    assert eager_error > 0
    assert error <= 1.1 * eager_error, f"{error:.4e} against eager's {eager_error:.4e}"


@pytest.mark.slow
def test_half_precision_is_summed_in_float32() -> None:
    """Over many chunks: no further from the truth than eager; sums in bfloat16 itself would be."""
    eager = build("qwen3", dtype=torch.bfloat16, max_position_embeddings=1024)
    truth = copy.deepcopy(eager).float()
    batch = plain(1, 1024)
    want = step(truth, batch)[1]
    errors = {"eager": total_error([(step(eager, batch)[1], want)])}
    for accumulate in ("float32", "weights"):
        streamed = transform(copy.deepcopy(eager), accumulate=accumulate)
        got = step(streamed, batch)[1]
        assert all(g is None or g.dtype == torch.bfloat16 for g in got.values())
        errors[accumulate] = total_error([(got, want)])
    assert errors["float32"] < 1.05 * errors["eager"] < errors["weights"], errors


# Most of them take minutes, and are made of ops that the others have too.
@pytest.mark.slow
@pytest.mark.parametrize("family", sample(OTHER_FAMILIES, OTHER_FAMILIES[12]))
def test_other_families(family: str) -> None:
    """Families nobody named: exact, whatever the schedule makes of them."""
    dtype = torch.float32 if family in FLOAT32_ONLY else torch.float64
    batches = {"T=67": plain(2, 67), "T=65": plain(2, 65), "T=11": plain(2, 11)}
    check_exact(functools.partial(build, family, dtype=dtype), batches)


MASKED = ["qwen2_sliding", "falcon_alibi", "qwen3_tied", "olmo3"]


@pytest.mark.slow
@pytest.mark.parametrize("family", sample(MASKED, "falcon_alibi"))
def test_other_families_masked(family: str) -> None:
    check_exact(functools.partial(build, family), masked())


SHIPPED = ["llama", "qwen3", "mistral", "gpt_neox", "opt", "olmo2"]


@pytest.mark.parametrize("family", sample(SHIPPED))
def test_float64_as_shipped(family: str) -> None:
    """The modelling code untouched, its float32 islands included (see e2e_models.true_double).

    With sdpa these families use float32 only row by row, so the gradients agree to 1e-9 all the
    same; the loss itself is a float32 number and may differ by its last bits.
    """
    eager, streamed = pair(functools.partial(build, family))
    for batch in (plain(2, 67), plain(2, 65)):
        want_loss, want = step(eager, batch)
        got_loss, got = step(streamed, batch)
        assert_close_loss(got_loss, want_loss, 4 * torch.finfo(torch.float32).eps)
        assert_close_grads(got, want, 1e-9)
