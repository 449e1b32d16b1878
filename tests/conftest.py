"""Settings of all tests."""

from __future__ import annotations

import gc

# The tests hold many graphs, and the default collector walks them all again and again: a sixth of their time.
gc.set_threshold(100_000, 50, 50)
