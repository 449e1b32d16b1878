"""Loops along the sequence: a step from row to row is streamed, and nothing else is taken for one."""

from . import layers, misread, outputs, steps, unrolled
from .parts import CASES

__all__ = ["CASES", "layers", "misread", "outputs", "steps", "unrolled"]
