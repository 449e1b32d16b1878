"""`transform` and `restore`: stream the training step of a model, in place, and put it back."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

import torch
from torch import nn

from .backend import schedules_of
from .errors import CaptureError
from .models.arguments import signature_of
from .models.nested_models import models_within
from .options import Options
from .runtime.step_counts import StepCounts, counts_of, together
from .schedule import Schedule
from .show.status import Status
from .streamed_forward import StreamedForward, all_forwards
from .versions import check_versions

RESTORED = "restore has put back the forward that the model had, as StreamBPCallback does when training ends"
# The steps of models that were transformed and are not any more.
_ended: weakref.WeakKeyDictionary[nn.Module, StepCounts] = weakref.WeakKeyDictionary()


def transform(
    model: nn.Module, chunk: int | str = "auto", *, verbose: bool = False, **options: Any
) -> nn.Module:
    """Stream the training forward and backward of a causal language model. Changes it in place.

    `model(input_ids=..., labels=...).loss.backward()` then gives the same loss and gradients, holding one
    chunk of one layer at a time. Evaluation, `no_grad` and generation run the original forward.

    Args:
        model: a Hugging Face causal language model, or a module with the same interface.
        chunk: rows of the sequence in a chunk of a layer, or "auto".
        verbose: print the schedule whenever a graph has been compiled, as in the first training step.
        options: the other fields of `Options`.

    Returns:
        The same object.

    Raises:
        ValueError: an option is unknown or has a value that is not allowed.
        TypeError: the model is no module.
        CaptureError: the model is not a causal language model.
    """
    check_versions()
    parsed = Options.parse({"chunk": chunk, **options})
    if not isinstance(verbose, bool):
        raise ValueError(f"verbose must be True or False, not {verbose!r}")
    load = f". Load it first: AutoModelForCausalLM.from_pretrained({model!r})"
    _check_module("transform", model, load if isinstance(model, str) else "")
    if isinstance(model, torch._dynamo.OptimizedModule):  # see NOTE [under another torch.compile]
        transform(model._orig_mod, chunk, verbose=verbose, **options)
        return model
    if not _takes_tokens(model, parsed.seq_dim or {}):
        raise CaptureError(
            f"{type(model).__name__} is not a causal language model: its forward takes no input_ids. "
            "Pass the model itself (for example AutoModelForCausalLM.from_pretrained(...)), or name the "
            'argument that carries the tokens, and its dim: seq_dim={"tokens": 1}.'
        )
    restore(model)
    for module in (model, *models_within(model)):
        within = None if module is model else model
        had_forward = "forward" in vars(module)
        module.forward = StreamedForward(module, module.forward, parsed, had_forward, verbose, within)
    return model


def _takes_tokens(model: nn.Module, seq_dim: Mapping[str, int]) -> bool:
    """True if the forward has an argument for tokens, or hands on whatever it is given to a model within."""
    parameters = signature_of(model, model.forward).parameters
    hands_on = any(p.kind is p.VAR_KEYWORD for p in parameters.values()) and bool(models_within(model))
    return hands_on or bool({"input_ids", *seq_dim} & parameters.keys())


def restore(model: nn.Module) -> nn.Module:
    """Undo `transform`. A model that is not transformed is left as it is.

    Args:
        model: any module.

    Raises:
        TypeError: it is no module.
    """
    _check_module("restore", model)
    if isinstance(model, torch._dynamo.OptimizedModule):
        restore(model._orig_mod)
        return model
    placed = _placed(model)
    if placed:
        _ended[model] = together(s.counts for s in placed).ended(RESTORED)
    for streamed in placed:
        streamed.active = False  # somebody may have put a wrapper over it
        if vars(streamed.model).get("forward") is streamed:
            streamed.unplace(streamed.model)
    for module in model.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, StreamedForward) and forward.is_carried_by(module):
            forward.unplace(module)
    return model


@contextlib.contextmanager
def untransformed(model: nn.Module) -> Iterator[None]:
    """Within: the model as it was before `transform`. Afterwards as it is now."""
    placed = _placed(model)
    before: list[tuple[Any, Any]] = [(s.model, vars(s.model).get("forward")) for s in placed]
    restore(model)
    try:
        yield
    finally:
        restore(model)
        for streamed, (module, forward) in zip(placed, before, strict=True):
            streamed.active = True
            if forward is not None:
                module.forward = forward


def _placed(model: nn.Module) -> list[StreamedForward]:
    """What streams a model and the models within it now."""
    model = getattr(model, "_orig_mod", model)
    return [s for s in all_forwards if s.active and (s.model is model or s.within is model)]


def _check_module(who: str, model: object, more: str = "") -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{who} needs a torch.nn.Module, not {type(model).__name__}{more}")


def _placed_within(model: nn.Module) -> list[StreamedForward]:
    """What streams the models that a module is a wrapper of."""
    modules = set(model.modules())
    return [s for s in all_forwards if s.active and s.model in modules]


def schedule(model: nn.Module) -> Schedule | None:
    """The schedule of the graph that was compiled last, or None before the first training step.

    Args:
        model: a model that `transform` changed, or one that `torch.compile(backend="streambp")` runs, itself
            or a part of it.

    Raises:
        TypeError: it is no module.
    """
    _check_module("schedule", model)
    found = schedules(model) or schedules_of(model)
    return max(found, key=lambda s: s.number, default=None)


def status(model: nn.Module) -> Status:
    """Whether the training steps of a model are streamed, since when, how many were, and why others were not.

    Args:
        model: any module; also one that `torch.compile` has wrapped, or a wrapper around one that is
            transformed. After `restore` it says how many steps there were.

    Raises:
        TypeError: it is no module.
    """
    _check_module("status", model)
    model = getattr(model, "_orig_mod", model)
    placed, graphs = _placed(model) or _placed_within(model), counts_of(model)
    door = "transform" if placed else "torch.compile" if graphs else None
    counts = together([*(s.counts for s in placed), *graphs])
    if door is None and model in _ended:
        counts = _ended[model]
    why = counts.why
    if not counts.total and why is None:
        why = _why_no_step(model, placed)
    since = datetime.fromtimestamp(counts.began) if counts.total else None
    return Status(
        door=door,
        streamed=counts.is_streamed,
        since=since,
        since_step=counts.began_with or None,
        why_not=why,
        reasons=dict(counts.reasons),
        streamed_steps=counts.streamed,
        unstreamed_steps=counts.unstreamed,
        part=_part(model, placed),
        schedule=schedule(model),
    )


def _part(model: nn.Module, placed: list[StreamedForward]) -> str | None:
    """What alone is streamed of a model: the models within it, where its own forward is not."""
    if not placed or any(s.counts.streamed for s in placed if s.within is None or s.model is model):
        return None
    names = [type(s.model).__name__ for s in placed if s.counts.streamed]
    if not names:
        return None
    return f"{', '.join(names)}, without a loss head that the forward over it may have"


def _why_no_step(model: nn.Module, placed: list[StreamedForward]) -> str:
    """Why there was no training step that could be streamed."""
    if not placed:
        return "it is neither transformed nor compiled with backend='streambp', or no graph was compiled yet"
    forward = vars(model).get("forward")
    own = [s for s in placed if s.model is model]
    if own and forward is not own[0]:
        name = getattr(forward, "__qualname__", type(forward).__name__)
        return f"no training step has come to it; its forward is now {name}, put there after transform"
    if not model.training:
        return "no training step has come to it; it is in evaluation mode: call model.train()"
    return "no training step has come to it"


def schedules(model: nn.Module) -> list[Schedule] | None:
    """Schedules of a model that `transform` changed; None if it did not."""
    placed = _placed(model)
    return [s for streamed in placed for s in streamed.schedules] if placed else None
