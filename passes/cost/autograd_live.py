"""autograd_live: an unchunked subgraph, forward and VJP as autograd runs them, to know what it costs.

NOTE [what autograd holds]
A step of autograd keeps all saved values and both gradients of an op until the whole op is differentiated,
and the roots until the end. Liveness over a graph of forward and VJP lets each go after its last use, and
comes out up to an eighth too low. So the subgraph is run on fake tensors, by the engine that runs it in a
step, and what is alive after each op is added up in symbols.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ..graph.facts import Facts
from ..graph.fake_values import Environment
from ..graph.subgraph import Subgraph
from ..graph.tracing import trace
from .program import tensor_bytes
from .storages import storage_of


class UnchunkedStep:
    """Forward and VJP of a subgraph as the runtime runs them (`runtime.segments.unchunked_segment`), on fake
    tensors of its own.

    The sizes are symbols of an environment of their own as well: what running it takes for granted about them
    must not become true of the captured graph.

    Args:
        facts: facts of the graph.
        part: the subgraph.
        backward: False for the forward alone.

    Attributes:
        symbols: the symbol of the captured graph for each of its own.
        recorded: bytes that are alive behind the forward, besides its values, once `live` was asked.
    """

    def __init__(self, facts: Facts, part: Subgraph, backward: bool = True) -> None:
        self.facts, self.part = facts, part
        environment = Environment(facts.values)
        self.mode, self.symbols = environment.mode, environment.symbols
        self.wanted = [k for k, n in enumerate(part.inputs) if n in facts.needs_grad]
        self.outputs = [k for k, n in enumerate(part.outputs) if n in facts.needs_grad]
        self.backward = backward and bool(self.wanted) and bool(self.outputs)
        cotangents = [part.outputs[k] for k in self.outputs] if self.backward else []
        self.recorded: sympy.Expr = sympy.S.Zero
        self._behind_forward: Callable[[list[Any]], None] | None = None
        self.flat = [environment.like(n.meta["val"]) for n in (*part.inputs, *cotangents)]

    def traced(self) -> tuple[GraphModule, int]:
        """A graph of ATen ops whose outputs are the values and then the gradients; the number of values."""
        with self.mode, enable_python_dispatcher(), torch.enable_grad():
            return trace(self._run, *self.flat), len(self.part.outputs)

    def live(self) -> list[sympy.Expr]:
        """Bytes over the inputs that are alive after each op, see NOTE [what autograd holds]."""
        with self.mode, enable_python_dispatcher(), torch.enable_grad(), _Meter(self.flat) as meter:
            self._behind_forward = lambda values: self._note(meter, values)
            self._run(*self.flat)
        self._behind_forward = None
        return meter.totals

    def _note(self, meter: _Meter, values: list[Any]) -> None:
        own = {storage_of(v) for v in values if isinstance(v, Tensor)}
        self.recorded = sympy.Add(*(size for key, size in meter.live.items() if key not in own))

    def _run(self, *flat: Any) -> list[Any]:
        given, cotangents = list(flat[: len(self.part.inputs)]), flat[len(self.part.inputs) :]
        if not self.backward:
            with torch.no_grad():
                return list(self.part.module(*given))
        for k in self.wanted:
            given[k] = given[k].detach().requires_grad_()
        values = list(self.part.module(*given))
        if self._behind_forward is not None:
            self._behind_forward(values)
        pairs = zip((values[k] for k in self.outputs), cotangents, strict=True)
        roots = [(v, g) for v, g in pairs if v.requires_grad]
        if not roots:
            return values
        outputs, coming = zip(*roots, strict=True)
        found = torch.autograd.grad(outputs, [given[k] for k in self.wanted], coming, allow_unused=True)
        return [*values, *(g for g in found if g is not None)]


class _Meter(TorchDispatchMode):
    """Adds up the storages of fake tensors that ops made and nobody has let go.

    Args:
        known: values whose storages do not count.
    """

    def __init__(self, known: Iterable[Any]) -> None:
        super().__init__()
        self.live: dict[int, sympy.Expr] = {}
        self.known = {storage_of(v) for v in known if isinstance(v, Tensor)}
        self.totals: list[sympy.Expr] = []
        self._total: sympy.Expr = sympy.S.Zero

    def _freed(self, key: int) -> None:
        self._total -= self.live.pop(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_iter(out):
            key = storage_of(value) if isinstance(value, Tensor) else None
            if key is None or key in self.live or key in self.known:
                continue
            self.live[key] = tensor_bytes(value)
            self._total += self.live[key]
            weakref.finalize(value.untyped_storage(), self._freed, key).atexit = False
        self.totals.append(self._total)
        return out
