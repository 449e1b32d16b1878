"""`make_fx` for a process with several threads: the only door of the compiler to it.

NOTE [tracing and threads]: while FX traces, a flag of the process is set and `torch.nn.Module` has other
methods; another thread's step then fails ("FX to symbolically trace a dynamo-optimized function"), and two
traces at once leave the flag set for ever. A program is traced when a step first needs it, at any time. So
one thread traces at a time, under the lock under which Dynamo compiles, which traces as well; and a trace of
ours sets neither: `make_fx` records ops by dispatch modes, which belong to their thread, and needs neither.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dynamo.convert_frame import compile_lock
from torch.fx import Graph, GraphModule, Tracer
from torch.fx.experimental.proxy_tensor import PythonKeyTracer, make_fx

from ...versions.differences import symbolic_sizes
from .kernel_settings import kernels_as_they_are


def trace(function: Callable[..., Any], *inputs: Any, pre_dispatch: bool = False) -> GraphModule:
    """The ops that a function runs on these inputs, as a graph.

    Autograd's anomaly mode is off meanwhile: it would look at values, which fake tensors do not have.

    Args:
        function: takes `inputs`, returns tensors.
        inputs: tensors, fake ones where the graph is to be symbolic, and numbers.
        pre_dispatch: record ops above autograd, where `linear` is one op.
    """
    quiet = torch.autograd.set_detect_anomaly(False)
    with compile_lock, _unseen_by_other_threads(), quiet, symbolic_sizes(), kernels_as_they_are():
        return make_fx(function, pre_dispatch=pre_dispatch, tracing_mode="real")(*inputs)


@contextlib.contextmanager
def _unseen_by_other_threads() -> Iterator[None]:
    """Within: `make_fx` makes its graph by `_graph_of`. Entered with the lock held."""
    if "trace" in vars(PythonKeyTracer):  # within another trace
        yield
        return
    PythonKeyTracer.trace = _graph_of  # type: ignore[method-assign]
    try:
        yield
    finally:
        del PythonKeyTracer.trace


def _graph_of(self: PythonKeyTracer, root: Any, concrete_args: Any = None) -> Graph:
    """What `Tracer.trace` makes of a function, for a tracer to which module calls mean nothing."""
    if isinstance(root, torch.nn.Module):
        return Tracer.trace(self, root, concrete_args)
    self.root, self.graph, self.tensor_attrs = torch.nn.Module(), Graph(tracer_cls=type(self)), {}
    function, proxies = self.create_args_for_root(root, False, concrete_args)
    self.create_node("output", "output", (self.create_arg(function(*proxies)),), {})
    self.submodule_paths = None
    return self.graph


@contextlib.contextmanager
def without_saved_tensors_hooks() -> Iterator[None]:
    """Within: what is saved is left alone. Somebody's hooks (offloading, checkpointing) are for the step.

    `torch.func` does not work under such hooks.
    """
    autograd = torch._C._autograd
    hooks = []
    try:
        while top := autograd._top_saved_tensors_default_hooks(True):
            hooks.append(top)
            autograd._pop_saved_tensors_default_hooks()
        yield
    finally:
        for pair in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(*pair)
