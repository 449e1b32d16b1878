"""Values within a model that a caller asks for by name (router logits): transformers records them by hooks.

The hooks are put on the modules when somebody asks for the first time, under a lock that Dynamo cannot enter.
While Dynamo traces for this project they are put there without being traced.
"""

from __future__ import annotations

import functools
import types

import torch
from torch import nn

from ..dynamo.copied_functions import copy_of
from ..dynamo.this_backend import is_traced_for_us
from ..versions.differences import recording_module


def trace_recorders() -> None:
    """Let Dynamo trace models that record what is within them."""
    recording = recording_module()
    install = getattr(recording, "maybe_install_capturing_hooks", None)
    if isinstance(install, types.FunctionType):
        _trace(install)


@functools.lru_cache(maxsize=1)
def _trace(install: types.FunctionType) -> None:
    same = copy_of(install)

    @torch._dynamo.assume_constant_result
    def installed(model: nn.Module) -> None:
        install(model)

    def stands_in(model: nn.Module) -> None:
        if is_traced_for_us():
            installed(model)
        else:
            same(model)

    torch._dynamo.substitute_in_graph(install, skip_signature_check=True)(stands_in)
