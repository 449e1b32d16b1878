"""Which backend Dynamo traces for."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch._dynamo.backends import distributed
from torch._dynamo.exc import ShortenTraceback, SkipFrame
from torch._dynamo.resume_execution import TORCH_DYNAMO_RESUME_IN_PREFIX
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_leaves

from ..errors import CaptureError
from ..passes.graph.ops.branch import BRANCH, PREDICATE, PREDICATE_OF_SIZE

MARK = "is_streambp_fx"
SQUEEZED = "the values of a tensor say whether `squeeze` removes a dim: name a dim that always has one entry"
REGION = torch.ops.higher_order.tag_activation_checkpoint


def modules_of_frame() -> Iterator[nn.Module]:
    """The modules of the frame that Dynamo is compiling: those of its local variables, and within them."""
    context = InstructionTranslator.current_tx()
    for value in tree_leaves(dict(context.f_locals)):
        if isinstance(value, nn.Module):
            yield from value.modules()


def goes_on_behind() -> str | None:
    """File and line of the graph break behind which the frame being compiled goes on, if it does."""
    code = InstructionTranslator.current_tx().f_code
    found = re.match(rf"{TORCH_DYNAMO_RESUME_IN_PREFIX}_.*_at_(\d+)", code.co_name)
    return None if found is None else f"{code.co_filename}:{found[1]}"


def runs_better_in_python(module: GraphModule) -> bool:
    """True for a graph that is not to be run if it is not streamed.

    It has checkpointed regions, which it may run otherwise than eager does, or bodies of branches, which it
    runs whatever the data says, or dims that data decides about.
    """
    asks = any(n.target in (REGION, BRANCH, PREDICATE, PREDICATE_OF_SIZE) for n in _nodes(module))
    return asks or squeezed_by_data(module) is not None


def squeezed_by_data(module: GraphModule) -> Node | None:
    """A `squeeze` of a dim of which the values of a tensor say how many entries it has, if there is one.

    NOTE [squeezed by data]: eager removes the dim if there is one entry. Dynamo takes it for a dim of more
    entries, asserts nothing, and has answered what Python asks of dims behind.
    """
    for node in _nodes(module):
        if not str(getattr(node.target, "__name__", node.target)).startswith("squeeze"):
            continue
        given = (n.meta.get("example_value") for n in node.all_input_nodes)
        value = next((v for v in given if isinstance(v, torch.Tensor)), None)
        dims = [v for v in tree_leaves((node.args[1:], node.kwargs)) if isinstance(v, int)]
        if value is not None and any(
            free_unbacked_symbols(value.shape[d]) for d in (dims or range(value.dim()))
        ):
            return node
    return None


def has_cut_checkpoints(module: GraphModule) -> bool:
    """True for a graph with a checkpointed region whose parameters eager leaves without a gradient.

    That is what `use_reentrant=True` means where a region is given nothing that has a gradient. The graph of
    the region gives them one.
    """
    reentrant = (n for n in _checkpoints(module) if n.kwargs.get("use_reentrant"))
    return any(not any(map(_has_gradient, n.args[1:])) for n in reentrant)


def _checkpoints(module: GraphModule) -> Iterator[Node]:
    """The checkpointed regions of a graph, and those within them."""
    return (n for n in _nodes(module) if n.target is REGION)


def _nodes(module: GraphModule) -> Iterator[Node]:
    """Those of a graph, and of the graphs within it."""
    graphs = (m.graph for m in module.modules() if isinstance(m, GraphModule))
    return (n for graph in graphs for n in graph.nodes)


def _has_gradient(operand: Any) -> bool:
    """True for a value that is known to have a gradient and is no parameter: regions read those."""
    value = operand.meta.get("example_value") if isinstance(operand, Node) else None
    return isinstance(value, torch.Tensor) and value.requires_grad and not isinstance(value, nn.Parameter)


def leave_to_python(why: str, needed: bool) -> None:
    """Have the frame that Dynamo is compiling run as Python code, if it need not be one graph.

    Args:
        why: its graph is not streamed.
        needed: the graph gives something else than the code.

    Raises:
        SkipFrame: for Dynamo.
        CaptureError: it is needed, and the frame has to be one graph (`fullgraph=True`).
    """
    if InstructionTranslator.current_tx().one_graph:
        if not needed:
            return
        raise unwrapped(
            CaptureError(f"{why}. With fullgraph=True, which allows no Python code, that is an error")
        )
    raise SkipFrame(f"streambp_fx: {why}")


def unwrapped(error: Exception) -> Exception:
    """An error as one that Dynamo hands on as it is. Others it wraps in one of its own.

    Args:
        error: what a backend is about to raise.

    Returns:
        an error of the same type, and with the same words.
    """
    kind, words = type(error), str(error)
    own: dict[str, Any] = {"__init__": kind.__init__, "__doc__": kind.__doc__, "__module__": kind.__module__}
    own["__str__"] = lambda self: words  # Dynamo adds to the message
    found = type(kind.__name__, (kind, ShortenTraceback), own)(*error.args)
    found.first_useful_frame = sys._getframe(1)
    return found


def is_cut_at_buckets() -> bool:
    """True if Dynamo hands over pieces of a graph that it has cut where a bucket of DDP's is full.

    Its `optimize_ddp` does so before a backend sees the graph, if the parameters fill more than one.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "compile_fn" and frame.f_globals is vars(distributed):
            return len(frame.f_locals.get("buckets", ())) > 1
        frame = frame.f_back
    return False


def beside_the_trace(forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call a streamed forward that somebody else's Dynamo has met, outside of the graph it is tracing.

    NOTE [under another torch.compile]: a compiler that traced through a streamed forward would run the
    original, unstreamed. Its graph ends before the streamed step and another begins behind it; the step has
    a Dynamo of its own. With `fullgraph=True`, where a graph may not end, it is an error, which says this.
    """
    return forward(*args, **kwargs)


beside_the_trace = torch.compiler.disable(
    beside_the_trace,
    reason="streambp_fx.transform streams this model in a graph of its own, which cannot be part of another: "
    "compile without fullgraph=True, or with backend='streambp' and without transform",
)


@torch._dynamo.assume_constant_result
def is_traced_for_export() -> bool:
    """True while `torch.export` traces.

    It is asked outside of the trace: Dynamo of PyTorch 2.11 takes it for True in every trace.
    """
    return torch.compiler.is_exporting()


@torch._dynamo.assume_constant_result
def is_traced_for_us() -> bool:
    """True while Dynamo traces for this project's backend, by whatever door."""
    return is_ours(InstructionTranslator.current_tx().output.compiler_fn)


def is_ours(backend: Any) -> bool:
    """True for this project's backend, and for what others have wrapped around it."""
    seen: set[int] = set()
    pending: list[Any] = [backend]
    while pending:
        found = pending.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        if getattr(found, MARK, False):
            return True
        names = ("compiler_fn", "func", "__wrapped__", "_torchdynamo_orig_backend", "fn", "__self__")
        pending += [getattr(found, n, None) for n in names]
    return False
