"""Calls of ops that have a rule: those that PyTorch's database of samples makes, and some by hand."""

from __future__ import annotations

import functools
import itertools
import operator
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Interpreter
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

aten = torch.ops.aten
DTYPES = (torch.float64, torch.complex128, torch.int64, torch.bool)
# Entries of the database under other names than the op's; the slow test goes through all entries.
ELSEWHERE = {
    "sum": ["sum"], "reciprocal": ["__rdiv__"], "clamp_min": ["nn.functional.normalize"],
    "layer_norm": ["nn.functional.layer_norm"], "cross_entropy_loss": ["nn.functional.cross_entropy"],
    "log_sigmoid": ["nn.functional.logsigmoid"], "linalg_vector_norm": ["linalg.vector_norm", "norm"],
    "index": ["__getitem__"], "slice": ["slice", "__getitem__"], "rsub": ["rsub", "__rsub__"],
    "reshape": ["reshape", "nn.functional.embedding_bag"], "numpy_T": ["T"], "where": ["where", "masked.var"],
    "to": ["to", "masked.mean"], "detach": ["nn.functional.embedding"], "prod": ["prod"],
    "lift_fresh_copy": ["unravel_index"], "arange": ["arange", "signal.windows.hann"],
    "scalar_tensor": ["scalar_tensor"], "empty": ["empty"], "pad": ["nn.functional.pad"],
}  # fmt: skip


@dataclass
class Call:
    """A call of an op with tensors of numbers.

    Attributes:
        source: where it comes from, for messages.
    """

    target: Any
    args: tuple
    kwargs: dict[str, Any]
    source: str

    def __str__(self) -> str:
        show = lambda v: f"{str(v.dtype)[6:]}{list(v.shape)}" if isinstance(v, Tensor) else v  # noqa: E731
        args, kwargs = torch.utils._pytree.tree_map(show, (self.args, self.kwargs))
        return f"{self.target}{args} {kwargs or ''} of {self.source}"


class _Recorder(Interpreter):
    """Runs a graph and keeps the calls of some ops."""

    def __init__(self, module: torch.fx.GraphModule, wanted: Any, source: str) -> None:
        super().__init__(module)
        self.wanted, self.source, self.calls = wanted, source, []  # type: ignore[var-annotated]

    def call_function(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if target in self.wanted and target is not operator.getitem:
            self.calls.append(Call(target, args, dict(kwargs), self.source))
        return super().call_function(target, args, kwargs)


def recorded(function: Callable[..., Any], arguments: Any, wanted: Any, source: str) -> list[Call]:
    """The calls of ops in `wanted` that a function makes, at the level at which models are captured."""
    leaves, spec = tree_flatten(arguments)
    tensors = [v for v in leaves if isinstance(v, Tensor)]

    def flat(*given: Tensor) -> Any:
        stream = iter(given)
        args, kwargs = tree_unflatten([next(stream) if isinstance(v, Tensor) else v for v in leaves], spec)
        return function(*args, **kwargs)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = make_fx(flat, pre_dispatch=True)(*tensors)
        recorder = _Recorder(graph, wanted, source)
        with torch.no_grad():
            recorder.run(*tensors)
    return recorder.calls


@functools.cache
def database() -> dict[str, list[Any]]:
    """Entries of PyTorch's database by name."""
    from torch.testing._internal.common_methods_invocations import op_db

    found: dict[str, list[Any]] = {}
    for info in op_db:
        found.setdefault(info.name, []).append(info)
    return found


def entries_for(target: Any) -> list[tuple[str, int]]:
    """Entries of the database that are likely to call an op, by name and number."""
    packet = target._schema.name.split("::")[1]
    short = packet.strip("_")
    names = {packet, short, f"nn.functional.{short}", f"linalg.{short}", f"special.{short}", f"__r{short}__"}
    names |= set(ELSEWHERE.get(packet, ()))
    return [(name, k) for name in sorted(names) for k in range(len(database().get(name, [])))]


@functools.cache
def calls_of_entry(
    entry: tuple[str, int], wanted: frozenset, samples: int | None
) -> tuple[list[Call], list[str]]:
    """Calls made by an entry's samples, at most so many of each dtype, and why some could not be recorded."""
    found, failed = [], []
    info = database()[entry[0]][entry[1]]
    for dtype in DTYPES:
        if dtype not in info.dtypes:
            continue
        name = f"{info.name}/{info.variant_test_name}/{dtype}"
        try:
            given = list(itertools.islice(_samples(info, dtype), 400))
        except Exception as error:
            failed.append(f"{name}: {error}")
            continue
        for sample in _spread(given, samples):
            arguments = ((sample.input, *sample.args), sample.kwargs)
            try:
                found += recorded(info.op, arguments, wanted, name)
            except Exception as error:
                failed.append(f"{name}: {error}")
    return found, failed


def _samples(info: Any, dtype: torch.dtype) -> Iterator[Any]:
    """Samples of an entry, each with the same seed.

    As `info.sample_inputs` without its look through the stack for the test, which took half of the time.
    """
    stream = iter(info.sample_inputs_func(info, "cpu", dtype, False))
    while True:
        torch.manual_seed(0)
        try:
            yield next(stream)
        except StopIteration:
            return


def _spread(values: list[Any], count: int | None) -> list[Any]:
    """So many of a list, evenly spread."""
    if count is None or len(values) <= count:
        return values
    return [values[k * len(values) // count] for k in range(count)]


# ---- samples by hand


HAND: list[Callable[[], Iterator[tuple[Callable[..., Any], tuple, dict[str, Any]]]]] = []


def by_hand(function: Callable) -> Callable:
    """Register a generator of `(function, args, kwargs)`."""
    HAND.append(function)
    return function


@functools.cache
def calls_by_hand(wanted: frozenset) -> dict[Any, list[Call]]:
    """The calls that samples by hand make, by op."""
    found: dict[Any, list[Call]] = {}
    for generator in HAND:
        torch.manual_seed(0)
        for k, (function, args, kwargs) in enumerate(generator()):
            name = f"{generator.__name__} {k}"
            if isinstance(function, torch._ops.OpOverload):
                calls = [Call(function, args, kwargs, name)]
            else:
                calls = recorded(function, (args, kwargs), wanted, name)
            for call in calls:
                found.setdefault(call.target, []).append(call)
    return found
