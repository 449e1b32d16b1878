"""program: what a program needs, as expressions in the sizes: bytes by liveness, operations by op.

Nothing here knows about layers or attention heads: a program is a graph whose values have symbolic sizes, and
its memory is what is alive after each op.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import sympy
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils._sympy.functions import CeilToInt, IntTrueDiv, Mod, PythonMod

from ..graph.facts import expression, tensors_of
from ..graph.ops.recurrence import KERNELS, RECURRENCE_KEPT
from ..graph.ops.row_selection import SELECTIONS
from . import recurrences, selected_rows
from .recurrences import kept_bytes
from .storages import Storages
from .work import Work, total, work_of_node

Substitution = Mapping[sympy.Symbol, sympy.Expr]


@dataclass(frozen=True)
class ProgramCost:
    """Cost of one call of a program.

    Attributes:
        peaks: bytes that are alive at once over the inputs, after those ops where nothing later or earlier is
            certain to need more; the peak is the largest of them.
        outputs: bytes of the values it returns.
        work: what it computes and moves.
        ops: how often each op is called.
        kept: bytes of inner values that the backward half of a joint program reads; None without one.
        saved: bytes of what it returns for another program to read, besides its values.
        recorded: bytes that autograd keeps behind the forward, besides its values, where autograd runs it.
    """

    peaks: tuple[sympy.Expr, ...]
    outputs: sympy.Expr
    work: Work
    ops: Counter[str]
    kept: sympy.Expr | None = None
    saved: sympy.Expr = sympy.S.Zero
    recorded: sympy.Expr = sympy.S.Zero

    @property
    def flops(self) -> sympy.Expr:
        """Floating-point operations of products and attention."""
        return self.work.flops

    @cached_property
    def peak(self) -> sympy.Expr:
        """Bytes over the inputs, as one expression."""
        return sympy.Max(sympy.S.Zero, *self.peaks)


def program_cost(
    module: GraphModule,
    sizes: Substitution,
    returned: int | None = None,
    live: Iterable[sympy.Expr] | None = None,
    throughout: Node | None = None,
    saved: int = 0,
    recorded: sympy.Expr = sympy.S.Zero,
) -> ProgramCost:
    """Cost of a program by liveness over its graph.

    Args:
        module: an FX graph of ATen ops whose nodes carry fake tensors in `meta["val"]`.
        sizes: what the size symbols of the graph are called outside; others keep their names.
        returned: how many of the outputs are values of the forward, in the graph of a forward with its VJP.
        live: bytes that are alive after each op, where the graph does not say it because autograd runs it.
        throughout: a node whose memory the caller keeps from one call to the next.
        saved: how many of the last outputs are for another program to read.
        recorded: bytes that autograd keeps behind the forward, besides its values.
    """
    graph = module.graph
    memory = Memory(graph, sizes, throughout)
    outputs = _outputs(graph)
    return ProgramCost(
        peaks=largest(memory.live_after_each_op() if live is None else (_rename(v, sizes) for v in live)),
        outputs=memory.bytes_of(outputs),
        work=total(map(work_of, graph.nodes)).map(lambda part: _rename(part, sizes)),
        ops=Counter(op_name(n) for n in graph.nodes if n.op == "call_function" and tensors_of(n)),
        kept=None if returned is None else memory.kept_after(outputs[:returned]),
        saved=memory.bytes_of(outputs[len(outputs) - saved :]),
        recorded=_rename(recorded, sizes),
    )


def work_of(node: Node) -> Work:
    """The work of one node, and of what runs within it if it is a recurrence, or a selection of rows."""
    if node.target in SELECTIONS:
        return selected_rows.inner_work(node)
    return recurrences.inner_work(node) if node.target in KERNELS else work_of_node(node)


def tensor_bytes(value: Tensor) -> sympy.Expr:
    """Bytes of the storage that a tensor of any shape and dtype lies in.

    Where a kernel rounds a size up to whole blocks, this is an upper bound.
    """
    try:
        size = expression(value.untyped_storage().nbytes())
    except NotImplementedError:
        size = expression(value.numel()) * value.element_size()
    if not size.has(CeilToInt, PythonMod, Mod):
        return size
    size = size.replace(CeilToInt, lambda quotient: quotient + 1).replace(IntTrueDiv, lambda a, b: a / b)
    # a remainder is only ever what is not added
    return size.replace(PythonMod, lambda a, b: sympy.S.Zero).replace(Mod, lambda a, b: sympy.S.Zero)


def largest(values: Iterable[sympy.Expr]) -> tuple[sympy.Expr, ...]:
    """The values without those that another one is certain to reach, sizes being positive."""
    kept: list[sympy.Expr] = []
    for value in dict.fromkeys(sympy.expand(v) for v in values):
        if any(_reaches(other, value) for other in kept):
            continue
        kept = [other for other in kept if not _reaches(value, other)]
        kept.append(value)
    return tuple(kept)


def _reaches(first: sympy.Expr, second: sympy.Expr) -> bool:
    """True if `first >= second` for all positive sizes: no term of the difference is negative."""
    difference = sympy.expand(first - second)
    return all(t.as_coeff_Mul()[0] >= 0 for t in sympy.Add.make_args(difference))


class Memory:
    """Bytes of a program's storages, and when they are held.

    Args:
        graph: of ATen ops whose nodes carry fake tensors in `meta["val"]`.
        sizes: what the size symbols of the graph are called, or their values.
        throughout: a node whose storage is there from the first op to the last.

    Attributes:
        storages: of the graph.
        bytes: of each storage; 0 for inputs.
    """

    def __init__(self, graph: Graph, sizes: Substitution, throughout: Node | None = None) -> None:
        self.sizes, self.storages = sizes, Storages(graph)
        self.nodes = self.storages.nodes
        self.bytes: dict[int, sympy.Expr] = {
            key: _rename(tensor_bytes(value), sizes) if self.storages.is_inside(key) else sympy.S.Zero
            for key, value in self.storages.first.items()
        }
        for node in self.nodes:
            if node.target is RECURRENCE_KEPT:  # its third result stands for what autograd has recorded
                self.bytes[self.storages.of[node][2]] = _rename(kept_bytes(node), sizes)
        for key in () if throughout is None else self.storages.of[throughout]:
            self.storages.made[key] = 0
            self.storages.readers[key].append(len(self.nodes) - 1)

    def live_after_each_op(self) -> list[sympy.Expr]:
        """Bytes held when each op has just run, its operands among them, in order; inputs do not count.

        Of an op that is made of others, several of which may hold most, there is more than one.
        """
        result = []
        for live, node in zip(self.storages.alive(self.bytes, sympy.S.Zero), self.nodes, strict=True):
            inner = [recurrences.inner_bytes(node)]
            inner += selected_rows.inner_bytes(node) if node.target in SELECTIONS else []
            result += [live + _rename(each, self.sizes) if each else live for each in inner]
        return result

    def bytes_of(self, nodes: Iterable[Node]) -> sympy.Expr:
        """Bytes of the storages that these nodes lie in, each storage once."""
        keys = dict.fromkeys(k for n in nodes for k in self.storages.of[n])
        return sum((self.bytes[k] for k in keys), sympy.S.Zero)

    def kept_after(self, values: list[Node]) -> sympy.Expr:
        """Bytes made up to the last of `values` and used later by anything but the output."""
        border = max((self.nodes.index(n) for n in values), default=-1)
        end = len(self.nodes) - 1
        given = {k for n in values for k in self.storages.of[n]}
        kept = (
            k
            for k, made in self.storages.made.items()
            if made <= border < self.storages.last(k) and not (k in given and self.storages.last(k) == end)
        )
        return sum((self.bytes[k] for k in kept), sympy.S.Zero)


def _rename(value: sympy.Expr, sizes: Substitution) -> sympy.Expr:
    return sympy.expand(sympy.sympify(value).subs(dict(sizes)))


def _outputs(graph: Graph) -> list[Node]:
    found = next(n for n in reversed(graph.nodes) if n.op == "output").args[0]
    values = found if isinstance(found, (tuple, list)) else [found]
    return [n for n in values if isinstance(n, Node)]


def op_name(node: Node) -> str:
    """The name of an op without its namespace."""
    return str(node.target).removeprefix("aten.")
