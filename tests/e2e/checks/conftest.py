"""Where random models and adversaries live: `STREAMBP_TEST_DEVICE=cuda python -m pytest tests/e2e/checks`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest
from e2e_models import DEVICE


@pytest.fixture(autouse=True)
def on_the_device() -> Iterator[None]:
    """Their tensors are made on PyTorch's default device."""
    with DEVICE if "STREAMBP_TEST_DEVICE" in os.environ else contextlib.nullcontext():
        yield
