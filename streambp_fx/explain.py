"""The schedule of a training step that is not run: for models of any size, also ones without weights."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from .backend import compile_graph
from .dynamo.meta_weights import meta_tensors_on
from .errors import CaptureError
from .options import Options
from .planning.engines import engine_for
from .runtime.executor import Executor
from .schedule import Schedule
from .streamed_forward import StreamedForward
from .transform import transform, untransformed

# A schedule, and by `id` of a parameter what it is in the graph.
Captured = tuple[Schedule, dict[int, Node]]


class _Explained(Exception):
    """Leaves Dynamo's trace with the schedule, before anything runs."""


def explain(
    model: nn.Module,
    seq_len: int,
    batch_size: int = 1,
    chunk: int | str = "auto",
    *,
    gpus: int | None = None,
    shard: str | None = None,
    wrap: str = "layers",
    reshard_after_forward: bool = True,
    **options: Any,
) -> Schedule:
    """The schedule of a training step with labels, without running it.

    Nothing of the size of the sequence is computed or allocated but the token ids. The weights may be on the
    meta device (`with torch.device("meta"): model = ...`).

    Args:
        model: a causal language model, transformed or not; it is left as it was.
        seq_len: tokens of each sequence, at least 2.
        batch_size: sequences in the batch.
        chunk: rows of the sequence in a chunk of a layer, or "auto".
        gpus, shard, wrap, reshard_after_forward: several devices that share the model, as for `plan`. The
            schedule shows what they gather and sum, and when.
        options: the other fields of `Options`.

    Raises:
        ValueError: a size or an option is not allowed.
        CaptureError: the model's forward cannot be captured as one graph.
        CompileError: a pass failed.
        PlanError: the devices are not what can be planned.
    """
    engine = engine_for(gpus, shard, wrap, reshard_after_forward)
    schedule, nodes = captured(model, seq_len, batch_size, {"chunk": chunk, **options})
    if engine is not None:
        engine.share(schedule.facts, model, nodes)
        if schedule.executor is not None:  # it was made before they share anything
            schedule.executor = Executor(schedule.facts, schedule.options)
    return schedule


def captured(model: nn.Module, seq_len: int, batch_size: int, options: Mapping[str, Any]) -> Captured:
    """The schedule of a step that is not run, and by `id` of a parameter what it is in the graph.

    Args:
        model, seq_len, batch_size: see `explain`.
        options: the fields of `Options`.

    Raises:
        ValueError: a size or an option is not allowed.
        CaptureError: the model's forward cannot be captured as one graph.
        CompileError: a pass failed.
    """
    if not isinstance(model, nn.Module):
        raise CaptureError(f"explain needs a torch.nn.Module, not {type(model).__name__}")
    for name, value, least in (("seq_len", seq_len, 2), ("batch_size", batch_size, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be an int of at least {least}, not {value!r}")
    parsed = Options.parse(dict(options))
    most = learned_positions(model)
    if most is not None and seq_len > most:
        raise CaptureError(_too_long(model, seq_len))
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    ids = torch.zeros(batch_size, seq_len, dtype=torch.long, device=device)
    found: list[Captured] = []
    refused: CaptureError | None = None
    for labels in (ids.clone(), ids[:, 0].clone()):  # of each token; of each sequence, as classifiers have
        try:
            with _prepared(model, parsed, found), contextlib.suppress(_Explained):
                model(input_ids=ids, labels=labels)
            break
        except CaptureError as error:
            refused = refused or error
    else:
        assert refused is not None
        most = positions_of(model)
        if most is None or seq_len <= most:
            raise refused
        raise CaptureError(_too_long(model, seq_len)) from refused
    if not found:
        raise CaptureError(f"the forward of {type(model).__name__} gave no graph to explain")
    schedule, nodes = found[-1]
    schedule.seq_len = seq_len
    return schedule, nodes


def positions_of(model: nn.Module) -> int | None:
    """How many tokens of a sequence the config of a model knows positions for; None if it does not say."""
    most = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return most if type(most) is int and most > 1 else None


def learned_positions(model: nn.Module) -> int | None:
    """How many positions a model has in a table, past which nothing is looked up; None if it has no table.

    It is known by its size: the positions of the config, or two more, for padding.
    """
    most = positions_of(model)
    tokens = getattr(model, "get_input_embeddings", lambda: None)()
    tables = (m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding) and m is not tokens)
    return most if most is not None and any(most <= rows <= most + 2 for rows in tables) else None


def _too_long(model: nn.Module, seq_len: int) -> str:
    return (
        f"{type(model).__name__} has {positions_of(model)} positions, and cannot be run on {seq_len} tokens"
    )


@contextlib.contextmanager
def _prepared(model: nn.Module, options: Options, found: list[Captured]) -> Any:
    """The model in training mode, with a forward that only explains itself; put back afterwards."""
    modes = {m: m.training for m in model.modules()}
    model.train()
    try:
        with untransformed(model):
            transform(model)
            streamed = vars(model)["forward"]
            streamed.options = options
            streamed._compiled = streamed._compile(functools.partial(_explain_graph, found))
            with torch.enable_grad(), meta_tensors_on(torch.device("cpu")):
                yield
    finally:
        for module, training in modes.items():
            module.training = training


def _explain_graph(
    found: list[Captured],
    owner: StreamedForward,
    module: GraphModule,
    example_inputs: Sequence[Any],
) -> Any:
    placeless = any(t.is_meta for t in (*owner.model.parameters(), *owner.model.buffers()))

    def tell(schedule: Schedule) -> None:
        given = (n for n in schedule.facts.nodes if n.op == "placeholder")
        found.append((schedule, {id(v): n for v, n in zip(example_inputs, given, strict=True)}))

    compile_graph(
        module,
        example_inputs,
        owner.options,
        tell,
        owner.sequence_dims,
        placeless=placeless,
        counts=owner.counts,
    )

    def leave(*inputs: Any) -> Any:
        raise _Explained

    return leave
