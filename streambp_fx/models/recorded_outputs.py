"""Values within a model that a caller asks for by name (router logits): transformers records them by hooks.

The hooks are put on the modules when somebody asks for the first time, under a lock that Dynamo cannot enter.
While Dynamo traces for this project they are put there without being traced.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator

import torch
from torch import nn

from ..dynamo.copied_functions import copy_of
from ..dynamo.this_backend import is_traced_for_us
from ..versions.differences import called_while_traced, recording_module


def trace_recorders() -> None:
    """Let Dynamo trace models that record what is within them."""
    recording = recording_module()
    install = getattr(recording, "maybe_install_capturing_hooks", None)
    if isinstance(install, types.FunctionType):
        _trace(install)


@contextlib.contextmanager
def collector_kept() -> Iterator[None]:
    """Within, Dynamo may leave transformers' collector as it was in the middle of a forward; not afterwards.

    Otherwise the next forward of any model would record nothing of what its caller asks for.
    """
    collector = getattr(recording_module(), "_active_collector", None)
    names = [n for n in ("compiling", "global_var") if hasattr(collector, n)]
    before = {n: getattr(collector, n) for n in names}
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(collector, name, value)


@functools.lru_cache(maxsize=1)
def _trace(install: types.FunctionType) -> None:
    same = copy_of(install)

    installed = called_while_traced(lambda model: install(model))

    def stands_in(model: nn.Module) -> None:
        if is_traced_for_us():
            installed(model)
        else:
            same(model)

    torch._dynamo.substitute_in_graph(install, skip_signature_check=True)(stands_in)
