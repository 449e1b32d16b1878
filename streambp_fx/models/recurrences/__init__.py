"""Functions of other libraries that go along the sequence with a state: captured as what they are, one op.

NOTE [recurrences are captured by their interface]: such a function is known by its parameters, which are
those of the kernels that people install (fla, mamba_ssm) and of what stands in for them in plain PyTorch:
what goes in by rows, the state to begin with, and whether the last state is wanted. That it does what the
interface says is not believed. When a model is first looked at the function is run on small random numbers,
whole and in two parts with the state handed over, and rows and gradients must agree. What does not pass is
captured as any other function is.
"""

from __future__ import annotations

from .declare import declare_recurrences

__all__ = ["declare_recurrences"]
