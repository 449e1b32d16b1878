"""Batches as users hand them over: slices of longer tensors, and sequences that grow and shrink."""

from __future__ import annotations

import pytest
from e2e_check import assert_all_chunked, check_exact
from e2e_models import build, tokens


@pytest.mark.slow
def test_a_slice_of_longer_ids_is_streamed() -> None:
    """Dynamo gives the stride of such a slice a symbol of its own; it is not a second sequence."""
    full = tokens(1, 256)
    batches = {
        "slice": {"input_ids": full[:, :96], "labels": full[:, :96]},
        "contiguous": {"input_ids": full[:, :70].clone(), "labels": full[:, :70].clone()},
        "slice of a batch": {"input_ids": tokens(2, 99)[:, 3:], "labels": tokens(2, 99)[:, 3:]},
    }
    _, streamed = check_exact(lambda: build("llama", "sdpa"), batches)
    assert_all_chunked(streamed)
