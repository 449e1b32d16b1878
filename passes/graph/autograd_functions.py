"""Custom autograd functions in a captured graph: kept as one node, with the gradient their author wrote.

NOTE [the author's gradient]: the forward of a `torch.autograd.Function` could be captured as plain ops, but
then it would be differentiated as plain ops too. A straight-through estimator, a clipped gradient or a
numerically better formula would be lost without a word. So the function stays one node of the graph.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, disable_functional_mode
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    set_proxy_slot,
    track_tensor_tree,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .determinism import is_deterministic
from .functionalization import drops_nothing, unwrapped
from .memory import Memory
from .ops.branch import BRANCH, PREDICATE, PREDICATE_OF_SIZE, asked_by, is_own_copy
from .refusals import CheckpointedError, HookError, MutationError, NotPureError

# NOTE [dropout that drops nothing]: its kernel returns its operand; its form for fake tensors, a copy.
DROPOUTS = {torch.nn.functional.dropout, torch.dropout}
# What Dynamo makes of `x.data`: a tensor without a gradient, as `detach` gives it.
DATA = getattr(torch._C._autograd, "_get_data_attr", None)
_count = itertools.count()


class CustomFunction:
    """A captured `torch.autograd.Function` as a callable, differentiable by its own backward.

    Args:
        forward: graph of the forward; returns outputs and saved values.
        backward: graph of the backward; takes gradients of the outputs and the saved values.
        options: what the author marked (non-differentiable outputs).

    Attributes:
        draws: forward or backward draw random numbers, or may do so.
        autocast: of the forward, by device type: a dtype, or None where it is off. (A backward says itself
            what it enters: without `custom_bwd` it is run without.)
        content: the same for functions that do the same.
    """

    def __init__(self, forward: GraphModule, backward: GraphModule, options: dict[str, Any]) -> None:
        self.forward, self.backward = forward, backward
        self.frozen = tuple(options.get("non_differentiable_idx", ()))
        self.draws = True
        self.autocast = _autocast_here()
        self.content = repr((content_of(forward), content_of(backward), options, self.autocast))
        self.__name__ = self.__qualname__ = f"custom_function_{next(_count)}"
        self.__module__ = __name__

    def __call__(self, *args: Any) -> Any:
        forward, backward, frozen, autocast = self.forward, self.backward, self.frozen, self.autocast
        saved: list[Any] = []

        class Apply(torch.autograd.Function):
            @staticmethod
            def forward(*inputs: Any) -> Any:
                with contextlib.ExitStack() as stack:
                    for device, dtype in autocast:
                        stack.enter_context(torch.autocast(device, dtype, dtype is not None, False))
                    output, values = Interpreter(forward).run(*inputs)
                saved[:] = values
                return output

            @staticmethod
            def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
                outputs = output if isinstance(output, (tuple, list)) else [output]
                ctx.mark_non_differentiable(*(outputs[k] for k in frozen))

            @staticmethod
            def backward(ctx: Any, *gradients: Any) -> Any:
                return Interpreter(backward).run(*gradients, *saved)

        return Apply.apply(*args)


def _autocast_here() -> tuple[tuple[str, torch.dtype | None], ...]:
    """By type of a device the dtype to which autocast casts; None where it is off."""
    accelerator = torch.accelerator.current_accelerator()
    devices = ("cpu", *(() if accelerator is None else (accelerator.type,)))
    enabled = torch.is_autocast_enabled
    return tuple((d, torch.get_autocast_dtype(d) if enabled(d) else None) for d in devices)


def content_of(module: GraphModule) -> list[Any]:
    """The ops of a graph without their names; tensors in it count by identity."""
    number = {n: f"%{k}" for k, n in enumerate(module.graph.nodes)}
    found: list[Any] = []
    for node in module.graph.nodes:
        target = node.target if node.op.startswith("call") else node.op
        if node.op == "get_attr":
            value = operator.attrgetter(node.target)(module)
            target = content_of(value) if isinstance(value, GraphModule) else id(value)
        given = torch.fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: number[n])
        found.append((node.op, target, given))
    return found


class Retrace(Interpreter):
    """Runs a Dynamo graph under `make_fx`, keeping custom functions as single nodes.

    Args:
        module: the Dynamo graph.
        floats: placeholders of Python floats that come as tensors: the tensor stands for the number.
        memory: what is seen of changes in place; None: nobody asks.
        tell_share: called after each node with the share of the nodes that were run.
    """

    def __init__(
        self,
        module: GraphModule,
        floats: frozenset[Node] = frozenset(),
        memory: Memory | None = None,
        tell_share: Callable[[float], None] | None = None,
    ) -> None:
        super().__init__(module)
        self.memory, self.tell_share = memory or Memory(), tell_share
        self.nodes, self.done = len(module.graph.nodes), 0
        self.items = {u for n in floats for u in n.users}
        self.autocasts: list[torch.autocast] = []

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph; regions of autocast that it has not left are left."""
        try:
            return super().run(*args, **kwargs)
        finally:
            while self.autocasts:
                self.autocasts.pop().__exit__(None, None, None)

    def run_node(self, n: Node) -> Any:
        """Run a node, and follow what it changes in place.

        Raises:
            HookError: a hook is registered on the gradient of an operand.
        """
        if n in self.items:
            return self.env[n.args[0]]
        self.node = n
        given = self.memory.versions([self.env[a] for a in n.all_input_nodes])
        if n.target is not BRANCH:
            self.memory.read_in_body(given, is_own_copy(n), n)
        if n.target is torch._C._set_grad_enabled:
            self.memory.synchronize()
        try:
            with _operands_keep_their_gradients([v.tensor for v in given]):
                result = super().run_node(n)
        except NotPureError as error:
            error.node = error.node or n
            raise
        self.memory.see(result, n.op == "call_method" and str(n.target).endswith("_"))
        self.memory.check(given, n)
        if n.target in (PREDICATE, PREDICATE_OF_SIZE):
            self.memory.begin_body(n)
        elif is_own_copy(n):
            self.memory.own(result)
        elif n.target is BRANCH:
            self.memory.read_in_body(self.memory.versions(self.env[n.args[1]]), False, n)
            self.memory.end_body(asked_by(n))
            if n.args[3]:
                self.memory.rebind([result, self.env[n.args[1]], self.env[n.args[2]]], n)
        if any(map(_is_hooked, (v.tensor for v in given))):
            raise HookError("a hook on the gradient of a value is registered in the forward", n)
        self.done += 1
        if self.tell_share is not None:
            self.tell_share(self.done / self.nodes)
        return result

    def call_function(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call an op. A checkpointed region is traced through; a custom autograd function becomes one node.

        Raises:
            CheckpointedError: a checkpointed region changes its inputs in place, or has a gradient that eager
                does not give it.
            MutationError: a custom autograd function changes its inputs in place.
        """
        if target is torch.ops.higher_order.tag_activation_checkpoint:
            # a checkpointed region: what is recomputed is decided by the schedule
            if kwargs.get("use_reentrant") and not any(map(self._has_gradient, self.node.args[1:])):
                raise CheckpointedError(
                    "a region that is checkpointed with use_reentrant=True is given nothing that has a "
                    "gradient, so that eager gives its parameters none",
                    self.node,
                )
            given = self.memory.versions(args[1:])
            result = Retrace(args[0], memory=self.memory).run(*args[1:])
            if any(v.tensor._version != v.number for v in given):
                raise CheckpointedError(
                    "a checkpointed region changes what it is given, which eager changes once more when it "
                    "recomputes the region",
                    self.node,
                )
            return result
        if target is DATA:
            return args[0].detach()
        if target is torch.sym_min and any(map(_selects, self.node.users)):
            return args[0] if args[0] <= args[1] else args[1]  # NOTE [columns that are selected]
        if target is torch.amp.autocast_mode._enter_autocast:  # `make_fx` records it, and does not enter it
            self.autocasts.append(torch.autocast(*args))
            return self.autocasts[-1].__enter__()
        if target is torch.amp.autocast_mode._exit_autocast:
            return self.autocasts.pop().__exit__(None, None, None)
        if target in DROPOUTS and drops_nothing(*args, **kwargs):
            return args[0] if args else kwargs["input"]
        if target is not torch._functorch.autograd_function.autograd_function_apply:
            return super().call_function(target, args, kwargs)
        if kwargs.get("dirty_idx"):
            raise MutationError("a custom autograd function changes its inputs in place", self.node)
        return _as_one_node(CustomFunction(args[0], args[1], kwargs), args[2:])

    def _has_gradient(self, operand: Any) -> bool:
        """True for a tensor with a gradient that is no parameter: those, a region reads by itself."""
        if not isinstance(operand, Node) or isinstance(operand.meta.get("example_value"), torch.nn.Parameter):
            return False
        value = self.env[operand]
        return isinstance(value, torch.Tensor) and value.requires_grad


@contextlib.contextmanager
def _operands_keep_their_gradients(operands: list[torch.Tensor]) -> Iterator[None]:
    """Within: an op in a region without gradients does not take the place of an operand that has one.

    NOTE [results that are operands]: some ops may return the very tensor that they are given (`to` the dtype
    that it has, `contiguous`), and the trace then takes every later use of the tensor for one of the result.
    In a region without gradients such a result would have none; so the tensor stands for what it was.
    """
    mode = None if torch.is_grad_enabled() else get_proxy_mode()
    if mode is None:
        yield
        return
    tracer = mode.tracer
    had = [v for v in operands if v.requires_grad and not isinstance(v, FunctionalTensor)]
    before = [get_proxy_slot(v, tracer, None) for v in had]
    yield
    for value, proxy in zip(had, before, strict=True):
        if proxy is not None and get_proxy_slot(value, tracer, None) is not proxy:
            set_proxy_slot(value, tracer, proxy)


def _selects(user: Node) -> bool:
    """True for an op of a Dynamo graph that selects as many of its operand's entries as a number says."""
    return user.target in ("topk", torch.topk, torch.ops.aten.topk.default)


def _is_hooked(value: torch.Tensor) -> bool:
    """True if somebody is to be given the gradient of a value.

    NOTE [hooks in the forward]: such a hook sees, and may change, the gradient of the whole value, once.
    Inside of a segment that gradient never exists. Dynamo makes an op of the registration; on the fake
    tensors of a trace it has happened, however it is written.
    """
    return bool(value._backward_hooks) or value.retains_grad


class _Random(TorchDispatchMode):
    """Looks for ops that may draw random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        self.found |= not is_deterministic(func)
        return func(*args, **(kwargs or {}))


def _draws(function: CustomFunction, inputs: tuple) -> bool:
    """True unless forward and backward, run on fake tensors of numbers for sizes, draw no random numbers."""
    with FakeTensorMode(), torch.no_grad(), _Random() as seen:
        try:
            given = pytree.tree_map(_with_numbers, inputs)
            output, saved = Interpreter(function.forward).run(*given)
            outputs = output if isinstance(output, (tuple, list)) else [output]
            gradients = [torch.zeros_like(o) if isinstance(o, torch.Tensor) else None for o in outputs]
            Interpreter(function.backward).run(*gradients, *saved)
        except Exception:
            return True
    return seen.found


def _with_numbers(value: Any) -> Any:
    """A fake tensor, or a number, with the sizes of the call that is captured."""
    size = lambda s: s.node.hint if isinstance(s, torch.SymInt) else s  # noqa: E731
    if not isinstance(value, torch.Tensor):
        return size(value)
    shape, stride = ([size(s) for s in sizes] for sizes in (value.shape, value.stride()))
    return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)


def _as_one_node(function: CustomFunction, inputs: tuple) -> Any:
    """Call a custom function, recorded as one node of the trace."""
    mode = get_proxy_mode()
    assert mode is not None
    functional = any(isinstance(v, FunctionalTensor) for v in inputs)
    given = tuple(map(unwrapped, inputs))
    proxies = pytree.tree_map(mode.tracer.unwrap_proxy, given)
    with disable_functional_mode(), disable_proxy_modes_tracing():
        output = function(*given)
        function.draws = _draws(function, given)
    proxy = mode.tracer.create_proxy("call_function", function, proxies, {})
    found = track_tensor_tree(output, proxy, constant=None, tracer=mode.tracer)
    if not functional:
        return found
    return pytree.tree_map_only(torch.Tensor, FunctionalTensor.to_functional, found)
