"""The tables of a block mask, taken out of a Dynamo graph that no longer reads them.

FlexAttention's tables say which blocks of the mask hold something. They are made of the mask function, with
`torch.vmap`, in the forward; a trace cannot look into that (`refused_effects.refuse_transforms`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import Graph, Interpreter, Node
from torch.nn.attention import flex_attention
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..graph.determinism import is_deterministic
from ..graph.functionalization import written_arguments

# The size of a block where no block mask was given: one that holds everything.
NO_BLOCKS = flex_attention._LARGE_SPARSE_BLOCK_SIZE
BEGIN, END, LOAD = "_vmap_increment_nesting", "_vmap_decrement_nesting", "lazy_load_decompositions"
USE = ("_add_batch_dim", "_remove_batch_dim")


def without_tables(graph: Graph, tables: Iterable[Node]) -> None:
    """Remove, in place, what was computed for the tables alone.

    Nothing is removed if any of it does more than compute values. Then a transform of functions may be left
    in the graph, which is refused.

    Args:
        graph: a Dynamo graph.
        tables: nodes that nobody reads any more.
    """
    removed = _made_for([*tables, *_unread_within_transforms(graph)])
    if not removed or not _computes_only(graph, removed):
        return
    for node in reversed(graph.nodes):
        if node in removed:
            graph.erase_node(node)
    open_regions: list[tuple[Node, bool]] = []
    for node in list(graph.nodes):
        name = _name(node)
        if name == BEGIN:
            open_regions.append((node, False))
        elif name in USE:
            open_regions = [(begin, True) for begin, _ in open_regions]
        elif name == END and open_regions:
            begin, used = open_regions.pop()
            if not used:
                graph.erase_node(begin)
                graph.erase_node(node)


def _name(node: Node) -> str:
    return getattr(node.target, "__name__", "") if node.op == "call_function" else ""


def _unread_within_transforms(graph: Graph) -> list[Node]:
    """Nodes that nobody reads, made of values to which a transform has given a dim."""
    inside: set[Node] = set()
    for node in graph.nodes:
        if _name(node) in USE or not inside.isdisjoint(node.all_input_nodes):
            inside.add(node)
    return [n for n in inside if not n.users]


def _made_for(tables: Iterable[Node]) -> set[Node]:
    """Nodes whose values go nowhere but into values that nobody reads, and changes of those."""
    found: set[Node] = set()
    pending = list(tables)
    while pending:
        node = pending.pop()
        if node in found or node.op in ("placeholder", "output"):
            continue
        found.add(node)
        pending += node.all_input_nodes
        pending += [u for u in node.users if u.target is operator.setitem and u.args[0] is node]
    while True:
        read = {n for n in found if any(u not in found for u in n.users)}
        # a change of a value that stays, stays
        read |= {n for n in found if n.target is operator.setitem and n.args[0] not in found}
        if not read:
            return found
        found -= read


class _Effects(TorchDispatchMode):
    """Looks for ops that draw random numbers, and for changes of tensors that were there before."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False
        self.made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        written = pytree.tree_leaves(written_arguments(func, args, kwargs or {}))
        changed = {_storage(v) for v in written if isinstance(v, Tensor)}
        self.found |= not is_deterministic(func) or not changed <= self.made
        given = {_storage(v) for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, Tensor)}
        result = func(*args, **(kwargs or {}))
        self.made |= {_storage(v) for v in pytree.tree_leaves(result) if isinstance(v, Tensor)} - given
        return result


def _storage(value: Tensor) -> int:
    return value.untyped_storage()._cdata


def _computes_only(graph: Graph, nodes: set[Node]) -> bool:
    """True if nodes, run on the fake tensors of Dynamo, do nothing but make values."""
    run = [n for n in graph.nodes if n in nodes or _name(n) in (BEGIN, END, LOAD)]
    fakes = [n.meta.get("example_value") for n in run]
    mode = next((v.fake_mode for v in fakes if hasattr(v, "fake_mode")), None)
    if mode is None:
        return False
    interpreter, levels = Interpreter(graph.owning_module, graph=graph), 0
    for node in graph.nodes:
        if node not in nodes and "example_value" in node.meta:
            interpreter.env[node] = node.meta["example_value"]
    try:
        with mode, enable_python_dispatcher(), torch.no_grad(), _Effects() as effects:
            for node in run:
                interpreter.env[node] = interpreter.run_node(node)
                levels += (_name(node) == BEGIN) - (_name(node) == END)
    except Exception:
        return False
    finally:
        for _ in range(levels):
            torch._C._functorch._vmap_decrement_nesting()
    return not effects.found
