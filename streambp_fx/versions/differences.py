"""What differs between versions of PyTorch and transformers: all of it is in here, and when it can go.

`DIFFERENCES` lists the functions below with the version from which on the new way is always there. Once the
oldest version that is supported (`MINIMUM`) has reached that, tests/test_versions.py fails and names
what can go. What was tried with which versions is in docs/versions.md.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.utils.checkpoint
import transformers
from torch._dispatch.python import enable_python_dispatcher

from . import release

TORCH = release(torch.__version__)
TRANSFORMERS = release(transformers.__version__)


class Difference(NamedTuple):
    """Something that is done in another way with older versions.

    Attributes:
        name: of the function or constant in this module.
        library: "torch" or "transformers".
        since: the release from which on the new way is there. When the oldest that is supported has reached
            it, the old way can go.
    """

    name: str
    library: str
    since: str


DIFFERENCES = (
    Difference("ignoring", "torch", "2.12"),
    Difference("quiet_partitioner", "torch", "2.13"),
    Difference("deciding_what_stays_whole", "torch", "2.12"),
    Difference("offload_ops", "torch", "2.12"),
    Difference("fsdp_groups", "torch", "2.12"),
    Difference("reset_fsdp", "torch", "2.13"),
    Difference("called_while_traced", "torch", "2.12"),
    Difference("ending_checkpoints", "torch", "2.13"),
    Difference("DYNAMIC_DIMS", "torch", "2.13"),
    Difference("symbolic_sizes", "torch", "2.13"),
    Difference("collective", "torch", "2.13"),
    Difference("GET_NEXT", "torch", "2.13"),
    Difference("GET_ATTRIBUTE", "torch", "2.14"),
    Difference("called_function", "torch", "2.15"),
    Difference("with_function", "torch", "2.15"),
    Difference("called_object", "torch", "2.15"),
    Difference("checkpoint_layers", "transformers", "5.23"),
    Difference("recording_module", "transformers", "5.2"),
    Difference("keep_forwards", "transformers", "5.2"),
    Difference("is_plain_recurrence", "transformers", "5.15"),
    Difference("masks_are_not_asked", "transformers", "5.13"),
)

#: Attribute of a tensor whose sizes in these dims Dynamo takes for symbols. No guard depends on it: before
#: 2.13 no guard depended on what `maybe_mark_dynamic` sets, either.
DYNAMIC_DIMS = "_dynamo_propagated_dynamic_indices" if TORCH >= (2, 13) else "_dynamo_weak_dynamic_indices"

#: Method of Dynamo's variables that answers what an attribute is.
GET_ATTRIBUTE = "tp_getattro_impl" if TORCH >= (2, 14) else "var_getattr"

#: Method of Dynamo's variables that answers what Python's `next` does.
GET_NEXT = "tp_iternext_impl" if TORCH >= (2, 13) else "next_variable"


def called_function(called: Any) -> Any:
    """What Dynamo knows of a function that is called, given that, or what it knows of a method.

    Before 2.15 a method is a function to Dynamo; from then on it has one.
    """
    return getattr(called, "im_func", called)


def with_function(called: Any, function: Any) -> Any:
    """What Dynamo knows of a function or a method, with another function in its place."""
    inner = called_function(called)
    made = inner.clone(fn=function)
    return made if inner is called else called.clone(im_func=made)


def called_object(method: Any) -> Any:
    """What Dynamo knows of the object whose method this is."""
    return method.obj if called_function(method) is method else method.im_self


@contextlib.contextmanager
def ignoring(functions: Sequence[Callable[..., Any]]) -> Iterator[None]:
    """Within: Dynamo leaves calls of these functions out of what it captures.

    PyTorch 2.11 writes its settings to a log after each compilation, and cannot write functions: it would
    print an error of 17 lines.

    Args:
        functions: they only write to a log, and return nothing that is read.
    """
    if TORCH < (2, 12):
        _log_settings_without_functions()
    with torch._dynamo.config.patch(ignore_logging_functions=set(functions)):
        yield


def quiet_partitioner() -> None:
    """PyTorch prints no graphs that a scan is cut into, unless `TORCH_LOGS` is set.

    Before 2.13 the logger of that module is at DEBUG, and what it says comes out.
    """
    if TORCH < (2, 13) and "TORCH_LOGS" not in os.environ:
        own = logging.getLogger("torch._higher_order_ops.partitioner")
        own.addFilter(lambda record: record.levelno > logging.DEBUG)


@functools.cache
def _log_settings_without_functions() -> None:
    from torch._dynamo import utils

    settings = utils._get_dynamo_config_for_logging

    def logged() -> str | None:
        with torch._dynamo.config.patch(ignore_logging_functions=set()):
            return settings()

    utils._get_dynamo_config_for_logging = logged


@contextlib.contextmanager
def deciding_what_stays_whole(mode: Any) -> Iterator[None]:
    """Within: a `FunctionalTensorMode` asks its own `_can_decompose` whether a composite op is decomposed.

    Before 2.12 that is no method: what it asks are a tag and a function of its module, and neither knows
    anything of operands.

    Args:
        mode: has `_can_decompose(func, args, kwargs)`, and in `call` the call that it was given last.
    """
    from torch._subclasses import functional_tensor

    if TORCH >= (2, 12):
        yield
        return
    asked = mock.patch.object(
        functional_tensor,
        "autograd_would_have_decomposed",
        lambda func, operands: mode._can_decompose(func, *mode.call),
    )
    with mock.patch("torch._decomp._should_decompose_because_unsafe_op", lambda op: False), asked:
        yield


def symbolic_sizes() -> contextlib.AbstractContextManager[Any]:
    """Within: ops that are made of other ops leave sizes symbols.

    Before 2.13 some of them ask for numbers in C++ (`linear`, `matmul`, all under `torch.func`), unless
    PyTorch's Python code for them is asked for. A program that has numbers serves chunks of one length only.
    """
    return contextlib.nullcontext() if TORCH >= (2, 13) else enable_python_dispatcher()


def offload_ops() -> ModuleType | None:
    """PyTorch's ops that copy to host memory and back beside the computation; None before 2.12."""
    try:
        from torch._functorch._activation_offloading import offload_ops as found
    except ImportError:
        return None
    return found


def fsdp_groups(state: Any) -> list[Any]:
    """The groups of parameters of an `FSDPState`: before 2.12 there is one, or none."""
    several = getattr(state, "_fsdp_param_groups", None)
    found = [state._fsdp_param_group] if several is None else several
    return [g for g in found if g is not None]


def reset_fsdp(root: Any) -> None:
    """An `FSDPState` and those below it are as before a forward. Before 2.13 there is nothing that does it.

    Args:
        root: the state of the module that is called first.
    """
    if hasattr(root, "_reset_iter_state"):
        root._reset_iter_state()
        return
    communication, context = root._comm_ctx, root._state_ctx
    for state in context.all_states:
        for group in fsdp_groups(state):
            group._training_state = type(group._training_state).IDLE
            group.wait_for_unshard()
            group.finalize_backward()
            group._partial_reduce_output = None
            group.reshard()
        state._training_state = type(state._training_state).IDLE
        getattr(state, "_modules_to_run_forward", set()).clear()
    communication.post_forward_order.clear()
    communication.all_gather_state = communication.reduce_scatter_state = None
    context.iter_forward_root, context.post_backward_final_callback_queued = None, False


def called_while_traced(function: Callable[[Any], None]) -> Callable[[Any], None]:
    """A function that Dynamo calls while it traces, and does not look into.

    Before 2.12 what it marks so cannot be given a module, which is no constant to it.

    Args:
        function: of a module, or of another object that Dynamo knows; it returns nothing.
    """
    if TORCH >= (2, 12):
        marked: Callable[[Any], None] = torch._dynamo.assume_constant_result(function)
        return marked

    def traced(context: Any) -> None:
        function(context.get_local("given")._i_will_not_complain_if_bc_breaks_VariableTracker().value)

    def call(given: Any) -> None:
        from torch._dynamo.comptime import comptime  # here, so that Dynamo knows where it comes from

        comptime(traced)

    return call


@contextlib.contextmanager
def ending_checkpoints() -> Iterator[None]:
    """Within: the checkpoints that an error leaves have ended when it is raised.

    Before 2.13 such a checkpoint ends when nobody holds the error any more. Until then its hooks take what
    any other step saves for its backward.
    """
    try:
        yield
    except BaseException as error:
        trace, open_ones = error.__traceback__, []
        while trace is not None and TORCH < (2, 13):
            if trace.tb_frame.f_code.co_filename == torch.utils.checkpoint.__file__:
                open_ones.append(trace.tb_frame.f_locals.get("gen"))
            trace = trace.tb_next
        for generator in reversed(open_ones):  # the innermost first
            if generator is not None:
                generator.close()
        raise


def recording_module() -> ModuleType | None:
    """Where transformers records values within a model that a caller asks for; None before 5.2."""
    try:
        return importlib.import_module("transformers.utils.output_capturing")
    except ModuleNotFoundError:
        return None


def keep_forwards(model: Any) -> None:
    """Modules whose values a model of transformers records (router logits) get their forward as an attribute.

    Before 5.2 such a model puts forwards over those of its modules while it runs, and then the originals
    back, which are attributes from then on. Dynamo follows that where they are attributes already.

    Args:
        model: any module; what its config asks for is recorded in each step.
    """
    if TRANSFORMERS >= (5, 2):
        return
    recorded = importlib.import_module("transformers.utils.generic")._CAN_RECORD_REGISTRY
    for module in model.modules():
        for name, wanted in (recorded.get(str(type(module))) or {}).items():
            if not getattr(getattr(module, "config", None), f"output_{name}", False):
                continue
            wanted = wanted if isinstance(wanted, list) else [wanted]
            classes: tuple[Any, ...] = tuple(
                c for w in wanted if isinstance(c := getattr(w, "target_class", w), type)
            )
            for inner in (m for m in module.modules() if isinstance(m, classes)):
                inner.__dict__.setdefault("forward", inner.forward)


def checkpoint_layers(model: Any, context: Callable[..., Any] | None = None, **options: Any) -> None:
    """Have the layers of a model of transformers checkpoint themselves. Before 5.23 that has another name.

    Args:
        model: a `PreTrainedModel`.
        context: `context_fn` of `torch.utils.checkpoint`, which chooses what is kept; None: nothing is.
        options: what newer versions take besides, as `offload`.
    """
    name = "activation_checkpointing_enable"
    switch = getattr(model, name if hasattr(model, name) else "gradient_checkpointing_enable")
    how: dict[str, Any] = {"use_reentrant": False}
    if context is not None:
        how["context_fn"] = context
    switch(how, **options)


def is_plain_recurrence(function: Callable[..., Any]) -> bool:
    """True for a function of transformers that stands in for a kernel of a recurrence.

    From 5.15 on a decorator says so. Before, it has the name of the kernel behind "torch_".

    Args:
        function: of a module of transformers.
    """
    return TRANSFORMERS < (5, 15) and function.__name__.startswith("torch_chunk_")


def masks_are_not_asked(classes: Iterable[type], is_traced: Callable[[], bool]) -> bool:
    """From now on the mask of a recurrence is handed on without a look at its values while a model is traced.

    From 5.13 on it is so. Before, a method of the model drops a mask of ones, and one behind a cache: it asks
    for values in Python, which Dynamo does not have. Rows are multiplied by the mask, so ones change nothing.

    Args:
        classes: of modules; those of transformers are changed, and once.
        is_traced: asked within a trace: is it one of this project's?

    Returns:
        True if a class was changed.
    """
    found = False
    for cls in classes if TRANSFORMERS < (5, 13) else ():
        for name in ("_update_linear_attn_mask", "_update_mamba_mask"):
            method = vars(cls).get(name)
            own = cls.__module__.startswith("transformers.models.")
            if own and method is not None and not hasattr(method, "__wrapped__"):
                setattr(cls, name, _not_asking(method, is_traced))
                found = True
    return found


def _not_asking(method: Callable[..., Any], is_traced: Callable[[], bool]) -> Callable[..., Any]:
    @functools.wraps(method)
    def mask_of(model: Any, mask: Any, before: Any = None) -> Any:
        """`before`: the positions up to 5.3, a cache from then on; either may be None."""
        if torch.compiler.is_dynamo_compiling() and is_traced() and (mask is None or mask.dim() == 2):
            if mask is None or before is None:
                return mask
            if isinstance(before, torch.Tensor):
                return torch.where(before[0] > 0, torch.ones_like(mask), mask)
        return method(model, mask, before)

    return mask_of


def collective(name: str) -> Callable[..., Any]:
    """A collective of `torch.distributed` whose result is one tensor.

    Args:
        name: "all_gather" or "reduce_scatter".
    """
    before = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}
    found: Callable[..., Any] | None = getattr(torch.distributed, f"{name}_single", None)
    return found if found is not None else getattr(torch.distributed, before[name])  # type: ignore[no-any-return]
