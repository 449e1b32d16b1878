"""checker: proves of a step program, without running it, that each value goes where it belongs.

It proves, instruction by instruction, with the functions of `checking`:

- what is read is held, on the device, gathered, and was not written over; nothing is made twice;
- what an instruction reads and makes are the values that its segment, or its part of the graph, reads and
  makes, and not others of the same shape;
- a segment is run in the same way forwards, again and backwards;
- each gradient comes from whoever has to make it, is complete when it is read, and reaches whoever reads it;
- what is promised is returned and handed over, once; nothing else is left at the end.

It takes for granted what is known of the graph (`Facts`), the chunk programs, and that the graph is run in
the step that its guards and masks ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..step.faults import Fault, place_of
from .checking.calls import check_call, check_call_loss, check_chunks_first
from .checking.gradients import (
    check_add,
    check_drop,
    check_hand_over,
    check_promises,
    check_return,
    check_seed,
    check_sum_shares,
    check_zeros,
)
from .checking.groups import (
    check_again,
    check_fetch,
    check_group,
    check_layers,
    check_leave,
    check_place,
)
from .checking.parts import check_defer, check_differentiate, check_linearize, check_run_part
from .checking.several import (
    check_collect_rows,
    check_give_back_parameters,
    check_reduce_gradients,
    check_rows_are_whole,
    check_take_parameters,
)
from .checking.step_state import State
from .program import (
    Add,
    Again,
    Call,
    CallLoss,
    ChunksFirst,
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
    StepProgram,
    SumShares,
    TakeParameters,
    Zeros,
)
from .text import step_line


class UnsoundStep(Exception):
    """A step reads what is not there, or leaves undone what it promises.

    Attributes:
        instruction: the one at which that is seen, or which has made what is left; None: what is wrong is
            wrong with the step as a whole.
    """

    def __init__(self, instruction: StepInstruction | None, words: str) -> None:
        super().__init__(f"step program{place_of(instruction, step_line)}: {words}")
        self.instruction = instruction


def check_step(program: StepProgram, dropped: bool = True) -> None:
    """Prove that a step program is sound.

    Args:
        dropped: values are dropped when nobody reads them any more; without that something may be left.

    Raises:
        UnsoundStep: it is not.
    """
    try:
        check_promises(program)
    except Fault as fault:
        raise UnsoundStep(None, str(fault)) from None
    state = State(program, dropped, _follow)
    for part in ("prologue", "forward", "backward"):
        state.part = part
        if part == "backward":
            unasked = program.forward_only  # nobody asks for them
            state.shared.gathered.update(dict.fromkeys(unasked, program.forward[-1]))
        for instruction in getattr(program, part):
            _follow(state, instruction)
    try:
        state.end()
    except Fault as fault:
        raise UnsoundStep(fault.instruction, str(fault)) from None


def _follow(state: State, instruction: StepInstruction) -> None:
    try:
        _has_form(state, instruction)
        check_place(state, instruction)
        check_rows_are_whole(state, instruction)
        CHECKS[type(instruction)](state, instruction)
    except UnsoundStep:
        raise
    except Fault as fault:
        raise UnsoundStep(fault.instruction or instruction, str(fault)) from None
    except Exception as error:  # it is so broken that nobody has thought of it
        raise UnsoundStep(instruction, f"{type(error).__name__}: {error}") from error


def _has_form(state: State, instruction: StepInstruction) -> None:
    """It is of a known kind, stands where such a one may, and does something.

    Raises:
        Fault: not so.
    """
    kind = type(instruction)
    if kind not in CHECKS:
        raise Fault(f"there is no instruction {kind.__name__}")
    place = state.part if state.within is None else "within"
    if place not in kind.places:
        raise Fault(f"it does not belong into the {place}")
    if kind in READING and (not instruction.inputs or instruction.results):
        raise Fault("it reads something, and makes nothing")
    if kind in MAKING and instruction.inputs:
        raise Fault("it reads nothing")
    for values in (instruction.inputs, instruction.results):
        if len(set(values)) < len(values):
            raise Fault("a value occurs twice")


CHECKS: Mapping[type, Callable[[State, Any], None]] = {
    RunPart: check_run_part,
    Differentiate: check_differentiate,
    Linearize: check_linearize,
    Call: check_call,
    CallLoss: check_call_loss,
    ChunksFirst: check_chunks_first,
    Group: check_group,
    Again: check_again,
    Layers: check_layers,
    Leave: check_leave,
    Fetch: check_fetch,
    Drop: check_drop,
    Defer: check_defer,
    Return: check_return,
    Seed: check_seed,
    Zeros: check_zeros,
    Add: check_add,
    HandOver: check_hand_over,
    CollectRows: check_collect_rows,
    SumShares: check_sum_shares,
    TakeParameters: check_take_parameters,
    GiveBackParameters: check_give_back_parameters,
    ReduceGradients: check_reduce_gradients,
}

#: What only reads, or only makes.
READING = (Leave, Fetch, Drop, HandOver, CollectRows, SumShares, TakeParameters, GiveBackParameters)
MAKING = (Seed, Zeros)
