"""Mutants that are right: what they change makes no difference, or one of speed that no test can see."""

from __future__ import annotations

# The mutant as it is printed: why.
EQUIVALENT: dict[str, str] = {}
