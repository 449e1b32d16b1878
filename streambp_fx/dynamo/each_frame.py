"""What is done around each frame that Dynamo compiles for this project's backend."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo import trace_rules
from torch._dynamo.convert_frame import CatchErrorsWrapper
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from .garbage import fewer_collections
from .skipped_frames import warn_of_limit, warn_of_mode
from .this_backend import MARK, is_ours

# NOTE [graphs of one model]: a model may be given a mask or not, positions or not, several dtypes, adapters:
# each is a graph. PyTorch compiles eight of one function, and runs it as it is from then on.
RECOMPILE_LIMIT = 64
# Compiles a frame, given the frame and what compiles it without arguments.
Around = Callable[[Any, Callable[[], Any]], Any]


def watch_frames(around: Around) -> None:
    """From now on each frame that is compiled for this backend is compiled by `around`.

    NOTE [asking about each frame]: a backend is called when a graph has been captured. What Dynamo refuses
    before, and inputs that it cannot trace, do not come to it, and there is no callback for them. So what
    Dynamo calls with each frame is wrapped.

    NOTE [numbers of rows that are values]: where rows are selected by their values, Dynamo is to go on with a
    symbol for their number. Where Python asks for that number, it then raises; so it tries once more, and
    ends the graph there.
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
                with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
                    found = around(frame, compiled)
            except GuardOnDataDependentSymNode:
                found = around(frame, compiled)
        if found.guarded_code is None:
            warn_of_mode(self)
            warn_of_limit(found, frame, limit)
        return found

    setattr(asked, MARK, True)
    CatchErrorsWrapper.__call__ = asked  # type: ignore[method-assign, assignment]
