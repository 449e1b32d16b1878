"""The training step as data: what it is made of, and nothing that decides.

values            what instructions read and make
instructions      what is done with them, one after the other
one_loop          several loops over chunks as one
step_program      all of it: prologue, forward, backward
"""

from .instructions import (
    Add,
    Again,
    Call,
    CallLoss,
    CollectRows,
    Defer,
    Differentiate,
    Drop,
    Fetch,
    GiveBackParameters,
    Group,
    HandOver,
    Layers,
    Leave,
    Linearize,
    ReduceGradients,
    Return,
    RunPart,
    Seed,
    StepInstruction,
    SumShares,
    TakeParameters,
    Zeros,
)
from .one_loop import ChunksFirst
from .step_program import StepProgram, flat, form_of, read_from_outside, segment_of, unrolled

__all__ = [
    "Add",
    "Again",
    "Call",
    "CallLoss",
    "ChunksFirst",
    "CollectRows",
    "Defer",
    "Differentiate",
    "Drop",
    "Fetch",
    "GiveBackParameters",
    "Group",
    "HandOver",
    "Layers",
    "Leave",
    "Linearize",
    "ReduceGradients",
    "Return",
    "RunPart",
    "Seed",
    "StepInstruction",
    "StepProgram",
    "SumShares",
    "TakeParameters",
    "Zeros",
    "flat",
    "form_of",
    "read_from_outside",
    "segment_of",
    "unrolled",
]
