"""Settings of all tests."""

from __future__ import annotations

import gc
import os

# The tests hold many graphs, and the default collector walks them all again and again: a sixth of their time.
gc.set_threshold(100_000, 50, 50)

# An op rule that raises anything but its refusal is a bug, and fails the test (`passes/rules/asking.py`).
os.environ.setdefault("STREAMBP_STRICT", "1")
# What each pass has made is verified (`passes/pipeline/verifier.py`).
os.environ.setdefault("STREAMBP_CHECK", "1")
