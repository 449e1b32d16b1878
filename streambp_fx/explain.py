"""The schedule of a training step that is not run: for models of any size, also ones without weights."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from .backend import compile_graph
from .dynamo.meta_weights import meta_tensors_on
from .errors import CaptureError
from .options import Options
from .schedule import Schedule
from .streamed_forward import StreamedForward
from .transform import transform, untransformed


class _Explained(Exception):
    """Leaves Dynamo's trace with the schedule, before anything runs."""


def explain(
    model: nn.Module, seq_len: int, batch_size: int = 1, chunk: int | str = "auto", **options: Any
) -> Schedule:
    """The schedule of a training step with labels, without running it.

    Nothing of the size of the sequence is computed or allocated but the token ids. The weights may be on the
    meta device (`with torch.device("meta"): model = ...`).

    Args:
        model: a causal language model, transformed or not; it is left as it was.
        seq_len: tokens of each sequence, at least 2.
        batch_size: sequences in the batch.
        chunk: rows of the sequence in a chunk of a layer, or "auto".
        options: the other fields of `Options`.

    Raises:
        ValueError: a size or an option is not allowed.
        CaptureError: the model's forward cannot be captured as one graph.
        CompileError: a pass failed.
    """
    for name, value, least in (("seq_len", seq_len, 2), ("batch_size", batch_size, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be an int of at least {least}, not {value!r}")
    parsed = Options.parse({"chunk": chunk, **options})
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    ids = torch.zeros(batch_size, seq_len, dtype=torch.long, device=device)
    found: list[Schedule] = []
    try:
        with _prepared(model, parsed, found), contextlib.suppress(_Explained):
            model(input_ids=ids, labels=ids.clone())
    except CaptureError as error:
        most = positions_of(model)
        if most is None or seq_len <= most:
            raise
        raise CaptureError(
            f"{type(model).__name__} has {most} positions, and cannot be run on {seq_len} tokens"
        ) from error
    if not found:
        raise CaptureError(f"the forward of {type(model).__name__} gave no graph to explain")
    found[-1].seq_len = seq_len
    return found[-1]


def positions_of(model: nn.Module) -> int | None:
    """How many tokens of a sequence the config of a model knows positions for; None if it does not say."""
    most = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return most if type(most) is int and most > 1 else None


@contextlib.contextmanager
def _prepared(model: nn.Module, options: Options, found: list[Schedule]) -> Any:
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
    found: list[Schedule], owner: StreamedForward, module: GraphModule, example_inputs: Sequence[Any]
) -> Any:
    placeless = any(t.is_meta for t in (*owner.model.parameters(), *owner.model.buffers()))
    compile_graph(
        module,
        example_inputs,
        owner.options,
        found.append,
        owner.sequence_dims,
        placeless=placeless,
        counts=owner.counts,
    )

    def leave(*inputs: Any) -> Any:
        raise _Explained

    return leave
