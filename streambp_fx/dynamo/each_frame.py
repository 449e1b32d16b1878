"""What is done around each frame that Dynamo compiles for this project's backend."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dynamo import trace_rules
from torch._dynamo.convert_frame import CatchErrorsWrapper
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from .garbage import fewer_collections
from .sizes import trace_again
from .skipped_frames import warn_of_limit, warn_of_mode
from .this_backend import MARK, is_ours

# NOTE [graphs of one model]: a model may be given a mask or not, positions or not, several dtypes, adapters:
# each is a graph. PyTorch compiles eight of one function, and runs it as it is from then on.
RECOMPILE_LIMIT = 64
# Dynamo's setting for numbers of rows that are values, and whether the frame of this thread has it from us.
NUMBERS = "capture_dynamic_output_shape_ops"
_frame = threading.local()
# Compiles a frame, given the frame and what compiles it without arguments.
Around = Callable[[Any, Callable[[], Any]], Any]


def watch_frames(around: Around) -> None:
    """From now on each frame that is compiled for this backend is compiled by `around`.

    NOTE [asking about each frame]: a backend is called when a graph has been captured. What Dynamo refuses
    before, and inputs that it cannot trace, do not come to it, and there is no callback for them. So what
    Dynamo calls with each frame is wrapped.

    NOTE [numbers of rows that are values]: where rows are selected by their values, Dynamo is to go on with a
    symbol for their number. Where Python asks for that number, it then raises; so it tries once more, and
    ends the graph there. So it does where the graph computes with that number: no chunk of it can.
    """
    if getattr(CatchErrorsWrapper.__call__, MARK, False):
        return
    original: Any = CatchErrorsWrapper.__call__

    @functools.wraps(original)
    def asked(self: CatchErrorsWrapper, frame: Any, *state: Any) -> Any:
        if trace_rules.check(frame.f_code) or not is_ours(self):
            return original(self, frame, *state)
        limit = max(RECOMPILE_LIMIT, torch._dynamo.config.recompile_limit)
        compiled = functools.partial(original, self, frame, *state)
        with torch._dynamo.config.patch(recompile_limit=limit, allow_rnn=True), fewer_collections():
            try:
                with torch._dynamo.config.patch({NUMBERS: True}), _with_numbers():
                    found = around(frame, compiled)
            except GuardOnDataDependentSymNode:
                found = around(frame, compiled)
        if found.guarded_code is None:
            warn_of_mode(self)
            warn_of_limit(found, frame, limit)
        return found

    setattr(asked, MARK, True)
    CatchErrorsWrapper.__call__ = asked  # type: ignore[method-assign, assignment]


@contextlib.contextmanager
def _with_numbers() -> Iterator[None]:
    before, _frame.with_numbers = getattr(_frame, "with_numbers", False), True
    try:
        yield
    finally:
        _frame.with_numbers = before


def end_graphs_at_numbers() -> None:
    """Have the frame that is compiled traced again, in graphs that end where rows are selected.

    Not if it has to be one graph, or was traced so before.

    Raises:
        TensorifyScalarRestartAnalysis: caught by Dynamo, which traces again.
    """
    if getattr(_frame, "with_numbers", False) and not InstructionTranslator.current_tx().one_graph:
        _frame.with_numbers = False
        setattr(torch._dynamo.config, NUMBERS, False)  # until this frame is done, see `watch_frames`
        trace_again("graphs that end where rows are selected")
