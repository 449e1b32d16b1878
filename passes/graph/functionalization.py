"""functionalization: a graph that changes tensors in place, traced by PyTorch's own functionalization.

NOTE [changes in place]: which tensors share memory is PyTorch's to know. A graph is first traced as it is, on
fake tensors, whose versions say whether an op changed something and whose storages say who else sees it. Only
a graph in which something is changed is traced again, through `FunctionalTensorMode`, as `torch.export` does:
each later read of a value that was changed, by whatever name, then reads the new value. New values of inputs
(buffers) become outputs, which the runtime writes back once per step, see `CapturedGraph.written`. The first
trace is needed also of a graph that names an op in place: it alone sees what is changed under `no_grad`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import fake_tensor
from torch._subclasses.functional_tensor import (
    FunctionalTensor,
    FunctionalTensorMode,
    disable_functional_mode,
)
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ...versions.differences import deciding_what_stays_whole
from .memory import Memory, storage_of
from .refusals import MutationError


def in_memory_of_their_own(values: Iterable[Tensor], others: Iterable[Tensor]) -> list[Tensor]:
    """What an op may return: later ops may write over it.

    Args:
        values: of any shape and dtype.
        others: what the op was given.

    Returns:
        the values, contiguous; a copy of each that shares memory with one before it, or with `others`.
    """
    seen, found = {storage_of(v) for v in others}, []
    for value in values:
        own = value.contiguous()
        found.append(own.clone() if storage_of(own) in seen else own)
        seen.add(storage_of(found[-1]))
    return found


class Functionalization(FunctionalTensorMode):
    """PyTorch's functionalization above autograd; composite ops that neither alias nor mutate stay whole.

    NOTE [facts about memory]: a schema says what an op may alias, but not every schema says it: `type_as`
    may return its operand, and `batch_norm` changes its statistics. So an op whose schema says nothing is run
    on fake tensors, and is decomposed if it shares memory with an operand or changes it.
    """

    def __init__(self) -> None:
        super().__init__(pre_dispatch=True)
        self.call: tuple[tuple, dict[str, Any]] = (), {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        dropout = (torch.ops.aten.dropout.default, torch.ops.aten.dropout_.default)
        if func in dropout and drops_nothing(*args, **(kwargs or {})):
            return args[0]  # NOTE [dropout that drops nothing]
        if func is torch.ops.aten.dropout_.default:  # and not the ops that PyTorch would make of it
            made = self._made(torch.ops.aten.dropout.default, types, args, kwargs or {})
            return self._made(torch.ops.aten.copy_.default, types, (args[0], made), {})
        return self._made(func, types, args, kwargs or {})

    def _made(self, func: Any, types: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        self.call = args, kwargs
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _can_decompose(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
        schema = func._schema
        if schema.is_mutable or any(a.alias_info is not None for a in schema.arguments):
            return True
        return _touches_operands(func, args, kwargs)


def drops_nothing(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, *, train: bool = True
) -> bool:
    """True for a call of dropout that returns its operand; the operand may have any shape and dtype."""
    return p == 0.0 or not (training and train)


def _touches_operands(func: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """True if a call, on the fake tensors inside, changes an operand or returns memory of one."""
    given = pytree.tree_map_only(FunctionalTensor, _inside, (args, kwargs))
    operands = [v for v in pytree.tree_leaves(given) if isinstance(v, Tensor)]
    if not operands:
        return False
    tried = disable_functional_mode(), disable_proxy_modes_tracing(), torch.no_grad(), _no_new_sizes(operands)
    with contextlib.ExitStack() as stack, _Changes() as changes:
        for one in tried:
            stack.enter_context(one)
        found = func(*given[0], **given[1])
    storages = {storage_of(v) for v in operands}
    made = {storage_of(v) for v in pytree.tree_leaves(found) if isinstance(v, Tensor)}
    return bool(storages & (made | changes.storages))


def _no_new_sizes(operands: list[Tensor]) -> contextlib.AbstractContextManager[None]:
    """Within: sizes that values would say are those of an op that is only tried, and are not waited for."""
    env = next((v.fake_mode.shape_env for v in operands if isinstance(v, fake_tensor.FakeTensor)), None)
    return contextlib.nullcontext() if env is None else env.ignore_fresh_unbacked_symbols()


class _Changes(TorchDispatchMode):
    """Which storages the ops inside a composite op change, by their schemas.

    Versions do not say it all: fake statistics of `batch_norm` keep theirs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            leaves = pytree.tree_leaves(written_arguments(func, args, kwargs or {}))
            self.storages |= {storage_of(v) for v in leaves if isinstance(v, Tensor)}
        return func(*args, **(kwargs or {}))


def written_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments of a call that the op writes over, by its schema."""
    arguments = func._schema.arguments
    given = {**dict(zip((a.name for a in arguments), args, strict=False)), **kwargs}
    return [given.get(a.name) for a in arguments if a.alias_info is not None and a.alias_info.is_write]


def written_operands(node: Node) -> list[Node]:
    """The operands that an op writes over, by its schema."""
    if not changes_something(node):
        return []
    written = pytree.tree_leaves(written_arguments(node.target, node.args, node.kwargs))
    return [n for n in written if isinstance(n, Node)]


def is_composite(func: Any) -> bool:
    """True for an op that PyTorch makes of others before autograd sees it; its schema may say less."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    if not isinstance(func, torch._ops.OpOverload):
        return False
    return key in func.py_kernels or torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


def changes_inside(nodes: Iterable[Node]) -> bool:
    """True if some composite op of a graph changes an operand, though its schema does not say so."""
    known: dict[tuple, bool] = {}
    for node in nodes:
        if not is_composite(node.target):
            continue
        others = [v for v in pytree.tree_leaves((node.args, node.kwargs)) if not isinstance(v, Node)]
        key = (node.target, str(others), len(node.all_input_nodes))
        if key not in known:
            known[key] = _changes_operands(node)
        if known[key]:
            return True
    return False


def _changes_operands(node: Node) -> bool:
    """True also where it cannot be tried: operands may fit only within a region of autocast."""
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    try:
        with _unlogged(), torch.no_grad(), enable_python_dispatcher(), _Changes() as changes:
            node.target(*args, **kwargs)
    except Exception:
        return True
    leaves = pytree.tree_leaves((args, kwargs))
    return bool(changes.storages & {storage_of(v) for v in leaves if isinstance(v, Tensor)})


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """Within: PyTorch does not log an op that fails on fake tensors as an error of its own."""
    log = logging.getLogger(fake_tensor.__name__)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _inside(value: FunctionalTensor) -> Tensor:
    with disable_proxy_modes_tracing():
        return torch._from_functional_tensor(value.elem)


def functional(run: Callable[..., Any], memory: Memory, written: list[int]) -> Callable[..., list[Any]]:
    """`run` without changes in place, to be traced.

    Args:
        run: function of the graph's inputs.
        memory: what `run` tells of the tensors that it makes.
        written: is given the positions of the inputs that `run` changes; their new values follow its results.
    """

    def wrapped(*inputs: Any) -> list[Any]:
        excluded = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)
        mode = Functionalization()
        with torch._C._ExcludeDispatchKeyGuard(excluded), deciding_what_stays_whole(mode), mode:
            given = [FunctionalTensor.to_functional(v) if isinstance(v, Tensor) else v for v in inputs]
            memory.see(given)
            results = list(run(*given))
            written.extend(_changed(given))
            return [unwrapped(v) for v in (*results, *(given[k] for k in written))]

    return wrapped


def _changed(given: Sequence[Any]) -> list[int]:
    found = []
    for position, value in enumerate(given):
        if not isinstance(value, FunctionalTensor):
            continue
        if torch._functionalize_has_metadata_mutation(value.elem):
            raise MutationError("the shape or the memory of an input is changed in place")
        if torch._functionalize_has_data_mutation(value.elem):  # type: ignore[attr-defined]
            found.append(position)
    return found


def changes_something(node: Node) -> bool:
    """True for an op that changes a tensor, by its schema."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def unwrapped(value: Any) -> Any:
    """What a functional tensor holds now; any other value as it is."""
    if not isinstance(value, FunctionalTensor):
        return value
    torch._sync(value)
    return torch._from_functional_tensor(value.elem)
