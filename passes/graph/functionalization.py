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
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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


class NotPureError(Exception):
    """The graph does something beside computing values, which a step in chunks could not do as eager does.

    Attributes:
        reason: why.
        node: the op of the Dynamo graph that does, if it is known.
    """

    def __init__(self, reason: str, node: Node | None = None) -> None:
        super().__init__(reason)
        self.reason, self.node = reason, node


class MutationError(NotPureError):
    """The graph does something to memory that has no functional form with the same value and gradient."""


class CheckpointedError(MutationError):
    """A checkpointed region does what is right only where Python runs the checkpoint itself."""


class NumberError(NotPureError):
    """A number is taken from the values of a tensor, which a shorter graph would be given."""


class BranchError(NotPureError):
    """Python asks the values of a tensor what to do, and what it does cannot be done whatever they are."""


class HookError(NotPureError):
    """The graph registers a hook on the gradient of a value."""


@dataclass
class _Seen:
    """A tensor of the trace that is still alive, and where its memory is."""

    tensor: weakref.ref[Tensor]
    storage: int


@dataclass
class Version:
    """A tensor before an op: how often it had been changed, what autograd knew of it, and where it lay."""

    tensor: Tensor
    number: int
    requires_grad: bool
    is_leaf: bool
    place: tuple[Any, ...]

    @property
    def is_parameter(self) -> bool:
        """True for a leaf that has a gradient: autograd sees no change of it."""
        return self.requires_grad and self.is_leaf


ASKS = "its code asks the values of a tensor whether"


@dataclass
class _Body:
    """The body of a branch on data while it is traced.

    Attributes:
        predicate: what the branch asks.
        outside: where the tensors lie that were there before.
        copied: of them, those that have been copied to be changed.
    """

    predicate: Node
    outside: set[int]
    copied: set[int]


class Memory:
    """What a trace has seen of memory: which tensors are alive, and what was changed in place.

    Attributes:
        changed: True if some op changed a tensor.
    """

    def __init__(self) -> None:
        self.changed = False
        self._seen: dict[int, _Seen] = {}
        self._bodies: list[_Body] = []
        self._rebound: list[Tensor] = []
        self._own: list[Tensor] = []

    def versions(self, values: Any) -> list[Version]:
        """The tensors among arguments of an op, as they are before it."""
        leaves = pytree.tree_leaves(values)
        own = [v for v in leaves if isinstance(v, Tensor) and not v.is_inference()]
        return [Version(v, v._version, v.requires_grad, v.is_leaf, self._place(v)) for v in own]

    def _place(self, value: Tensor) -> tuple[Any, ...]:
        """What a body must leave as it is of a tensor itself: `detach_`, `t_` and `set_` change no values."""
        if not self._bodies:
            return ()
        return value.requires_grad, value.is_leaf, value.shape, value.stride(), _storage(value)

    def see(self, values: Any) -> None:
        """Remember the tensors among inputs or results of an op."""
        for value in pytree.tree_leaves(values):
            if isinstance(value, Tensor) and id(value) not in self._seen:
                key = id(value)
                gone = lambda _, key=key: self._seen.pop(key, None)  # noqa: E731
                self._seen[key] = _Seen(weakref.ref(value, gone), _storage(value))

    def check(self, before: list[Version], node: Node) -> None:
        """Look at what an op did to its arguments.

        NOTE [changes that autograd does not see]: in a region without gradients, or through `detach`, a
        change in place is no op of autograd's graph: the value is another one, and its gradient is still that
        of the old value. No functional op has that gradient, so such a graph is refused.

        Raises:
            MutationError: the op changed a tensor that has a gradient, and autograd did not see it.
            BranchError: it stands in the body of a branch, and changed a tensor from outside of it.
        """
        for was in before:
            value = was.tensor
            self._check_place(was, node)
            if value._version == was.number:
                continue
            self.changed = True
            storage = _storage(value)
            if any(storage in body.outside for body in self._bodies):
                raise BranchError(
                    f"{ASKS} to change another one in place by a name that it does not say", node
                )
            if any(storage == _storage(v) for v in self._rebound):
                raise BranchError(f"{ASKS} which of two tensors is changed in place later", node)
            recorded = torch.is_grad_enabled() and value.requires_grad and not was.is_parameter
            others = [t for t in self._sharing(value) if not (recorded and _base(t) is _base(value))]
            begins = recorded and not was.requires_grad
            if any(t.requires_grad or begins for t in others):
                raise MutationError(
                    "a value that has a gradient is changed in place where autograd does not see it "
                    "(under no_grad, or through detach)",
                    node,
                )

    def _check_place(self, was: Version, node: Node) -> None:
        changed = was.place and was.place != self._place(was.tensor) and was.tensor._version == was.number
        if changed and any(was.place[-1] in body.outside for body in self._bodies):
            raise BranchError(f"{ASKS} to change what is known of another one", node)

    def begin_body(self, predicate: Node) -> None:
        """From here on the body of a branch runs, which must change nothing in place that is there now.

        Args:
            predicate: what the branch asks.
        """
        self._bodies.append(_Body(predicate, {seen.storage for seen in self._seen.values()}, set()))

    def read_in_body(self, before: list[Version], is_own_copy: bool, node: Node) -> None:
        """An op in the body of a branch reads tensors.

        Args:
            before: the tensors.
            is_own_copy: it makes the copy that the body changes in the place of a tensor.
            node: the op.

        Raises:
            BranchError: it reads by another name what the body changes.
        """
        for storage in (_storage(v.tensor) for v in before) if self._bodies else ():
            if any(storage in body.copied for body in self._bodies):
                raise BranchError(f"{ASKS} to change another one in place, and reads that by two names", node)
            if is_own_copy:
                self._bodies[-1].copied.add(storage)

    def own(self, copy: Tensor) -> None:
        """A copy, of any shape and dtype, that the body of a branch changes in the place of a tensor."""
        self._own.append(copy)

    def rebind(self, values: list[Any], node: Node) -> None:
        """Of these tensors a variable is one or the other: later changes in place of either are refused.

        Raises:
            BranchError: one of them lies in the memory of a copy, and would be a view of the tensor itself.
        """
        found = [v for v in values if isinstance(v, Tensor)]
        if {_storage(v) for v in self._own} & {_storage(v) for v in found}:
            raise BranchError(f"{ASKS} to make a view of what it changes in place", node)
        self._rebound += found

    def end_body(self, predicate: Node) -> None:
        """The body of the branch is done, and so are those within it."""
        known = [k for k, body in enumerate(self._bodies) if body.predicate is predicate]
        del self._bodies[known[0] if known else len(self._bodies) :]

    def _sharing(self, value: Tensor) -> list[Tensor]:
        storage = _storage(value)
        found = (seen.tensor() for seen in self._seen.values() if seen.storage == storage)
        return [value, *(t for t in found if t is not None)]

    def synchronize(self) -> None:
        """Bring all names of changed values up to date.

        Done where gradients are switched on or off: functionalization would otherwise make a view anew at its
        next use, and an op belongs to the region in which it is recorded.
        """
        for seen in list(self._seen.values()):
            value = seen.tensor()
            if isinstance(value, FunctionalTensor):
                torch._sync(value)


def _base(value: Tensor) -> Tensor:
    """What autograd takes a tensor to be a view of; the tensor itself if it is none."""
    return value._base if value._is_view() and value._base is not None else value


def in_memory_of_their_own(values: Iterable[Tensor], others: Iterable[Tensor]) -> list[Tensor]:
    """What an op may return: later ops may write over it.

    Args:
        values: of any shape and dtype.
        others: what the op was given.

    Returns:
        the values, contiguous; a copy of each that shares memory with one before it, or with `others`.
    """
    seen, found = {_storage(v) for v in others}, []
    for value in values:
        own = value.contiguous()
        found.append(own.clone() if _storage(own) in seen else own)
        seen.add(_storage(found[-1]))
    return found


def _storage(value: Tensor) -> int:
    return value.untyped_storage()._cdata if not isinstance(value, FunctionalTensor) else id(value)


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
    storages = {_storage(v) for v in operands}
    made = {_storage(v) for v in pytree.tree_leaves(found) if isinstance(v, Tensor)}
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
            self.storages |= {_storage(v) for v in leaves if isinstance(v, Tensor)}
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
    return bool(changes.storages & {_storage(v) for v in leaves if isinstance(v, Tensor)})


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
