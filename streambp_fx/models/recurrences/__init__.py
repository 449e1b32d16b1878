"""Functions of other libraries that go along the sequence with a state: captured as what they are, one op.

NOTE [recurrences are captured by their interface]: such a function is one of transformers that calls a kernel
of fla or of mamba_ssm, or what stands in for it in plain PyTorch, under the kernel's parameters: what goes in
by rows, the state to begin with, and whether the last state is wanted. Nobody else's function is taken for
one, whatever its parameters are called: what it does with blocks, with the length or with globals cannot be
seen from outside. That a function does what its interface says is tried when a model is first looked at: on
small random numbers, whole and in parts with the state handed over, rows and gradients must agree.
"""

from __future__ import annotations

from . import rnn_layers  # noqa: F401
from .declare import declare_recurrences

__all__ = ["declare_recurrences"]
