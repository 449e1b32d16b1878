"""Loops along the sequence: a step from row to row is streamed, and nothing else is taken for one."""

from . import first_rows, layers, misread, outputs, states, steps, unrolled
from .parts import CASES

__all__ = ["CASES", "first_rows", "layers", "misread", "outputs", "states", "steps", "unrolled"]
