"""Custom autograd functions in a captured graph: kept as one node, with the gradient their author wrote.

NOTE [the author's gradient]: the forward of a `torch.autograd.Function` could be captured as plain ops, but
then it would be differentiated as plain ops too. A straight-through estimator, a clipped gradient or a
numerically better formula would be lost without a word. So the function stays one node of the graph.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    make_fx,
    track_tensor_tree,
)
from torch.utils import _pytree as pytree

from .ir import Facts, Layout, NotSeparable, expression, shape_of
from .rules import RuleContext
from .rules.pointwise import align, pointwise_ops

_count = itertools.count()


class CustomFunction:
    """A captured `torch.autograd.Function` as a callable, differentiable by its own backward.

    Args:
        forward: graph of the forward; returns outputs and saved values.
        backward: graph of the backward; takes gradients of the outputs and the saved values.
        options: what the author marked (non-differentiable outputs).
    """

    def __init__(self, forward: GraphModule, backward: GraphModule, options: dict[str, Any]) -> None:
        self.forward, self.backward = forward, backward
        self.frozen = tuple(options.get("non_differentiable_idx", ()))
        self.__name__ = self.__qualname__ = f"custom_function_{next(_count)}"
        self.__module__ = __name__

    def __call__(self, *args: Any) -> Any:
        forward, backward, frozen = self.forward, self.backward, self.frozen
        saved: list[Any] = []

        class Apply(torch.autograd.Function):
            @staticmethod
            def forward(*inputs: Any) -> Any:
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


class Retrace(Interpreter):
    """Runs a Dynamo graph under `make_fx`, keeping custom functions as single nodes.

    Args:
        module: the Dynamo graph.
        floats: placeholders of Python floats that come as tensors: the tensor stands for the number.
        meta_as: device that takes the place of the meta device, or None.
    """

    def __init__(
        self,
        module: GraphModule,
        floats: frozenset[Node] = frozenset(),
        meta_as: torch.device | None = None,
    ) -> None:
        super().__init__(module)
        self.meta_as = meta_as
        self.items = {u for n in floats for u in n.users}

    def run_node(self, n: Node) -> Any:
        return self.env[n.args[0]] if n in self.items else super().run_node(n)

    def fetch_args_kwargs_from_env(self, n: Node) -> tuple[tuple, dict]:
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        if self.meta_as is None:
            return args, kwargs
        on_meta = lambda v: isinstance(v, torch.device) and v.type == "meta"  # noqa: E731
        return pytree.tree_map(lambda v: self.meta_as if on_meta(v) else v, (args, kwargs))

    def call_function(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if target is torch.ops.higher_order.tag_activation_checkpoint:
            # a checkpointed region: what is recomputed is decided by the schedule
            return Retrace(args[0], meta_as=self.meta_as).run(*args[1:])
        if target is not torch._functorch.autograd_function.autograd_function_apply:
            return super().call_function(target, args, kwargs)
        if kwargs.get("dirty_idx"):
            raise NotImplementedError("a custom autograd function that changes its inputs in place")
        function = CustomFunction(args[0], args[1], kwargs)
        mode = get_proxy_mode()
        assert mode is not None
        inputs = args[2:]
        proxies = pytree.tree_map(mode.tracer.unwrap_proxy, inputs)
        with disable_proxy_modes_tracing():
            output = function(*inputs)
        proxy = mode.tracer.create_proxy("call_function", function, proxies, {})
        return track_tensor_tree(output, proxy, constant=None, tracer=mode.tracer)


def custom_layout(context: RuleContext, node: Node) -> Layout:
    """Rows stay rows if every op of forward and backward is elementwise on one shape."""
    function = node.target
    assert isinstance(function, CustomFunction)
    inputs = [a for a in node.args if isinstance(a, Node) and isinstance(a.meta.get("val"), torch.Tensor)]
    shapes = {shape_of(n) for n in inputs}
    if len(shapes) != 1:
        raise NotSeparable("a custom autograd function of operands of different shapes")
    _check_elementwise(context.facts, node, function)
    outputs = pytree.tree_leaves(node.meta["val"])
    sizes = [tuple(expression(s) for s in o.shape) for o in outputs if isinstance(o, torch.Tensor)]
    if any(s not in shapes for s in sizes):
        raise NotSeparable("a custom autograd function that changes the shape")
    return align(context, inputs[0], inputs)


def _check_elementwise(facts: Facts, node: Node, function: CustomFunction) -> None:
    """Trace forward and backward on small tensors and look at the ops."""
    small = [_small(a) for a in node.args]

    def both(*tensors: Any) -> Any:
        output, saved = Interpreter(function.forward).run(*tensors)
        outputs = output if isinstance(output, (tuple, list)) else [output]
        return outputs, Interpreter(function.backward).run(*outputs, *saved)

    try:
        with torch.no_grad():
            traced = make_fx(both)(*small)
    except Exception as error:
        raise NotSeparable(f"a custom autograd function that cannot be looked into ({error})") from error
    allowed = set(pointwise_ops())
    for inner in traced.graph.nodes:
        if inner.op != "call_function":
            continue
        value = inner.meta.get("val")
        same = isinstance(value, torch.Tensor) and tuple(value.shape) in ((2, 3), ())
        if inner.target not in allowed or not same:
            raise NotSeparable(f"a custom autograd function that uses {inner.target}")


def _small(argument: Any) -> Any:
    """A stand-in for an argument: a small tensor, a number, or the argument itself."""
    value = argument.meta["val"] if isinstance(argument, Node) else argument
    if isinstance(value, torch.Tensor):
        return torch.ones(2, 3, dtype=value.dtype)
    return 6 if isinstance(argument, Node) else argument
