"""A callback that streams a trainer's model while it trains."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from ..errors import warn
from ..options import Options
from ..schedule import Schedule
from ..transform import restore, schedules, status, transform

PEAK, CHUNK = "streambp/peak_bytes", "streambp/chunk"


class StreamBPCallback(TrainerCallback):
    """Streams the model of a `transformers.Trainer`, or of a trainer derived from it, while it trains.

    `trainer = Trainer(..., callbacks=[StreamBPCallback(chunk=2000)])`

    The model is transformed when training begins and restored when it ends. A model that was transformed
    before keeps its options and stays transformed. If training raises, transformers tells no callback: call
    `close`, or train again, which begins anew.

    Each entry of the trainer's log gains `streambp/peak_bytes`, the most that the activations of a step have
    taken so far by the cost model, in bytes, and `streambp/chunk`, the rows of a chunk in that step. For that
    the callback takes the first place among those of the trainer: the integrations that `report_to` names
    (TensorBoard, say) see the two as well.

    A model that `torch_compile=True` compiles as well is streamed: the graphs of that compiler end before a
    streamed step and begin behind it, so it has nothing to compile but the evaluation. If no step of a
    training was streamed, a warning says why when it ends.

    Args:
        chunk: rows of the sequence in a chunk of a layer, or "auto".
        verbose: print the schedule whenever a graph has been compiled.
        options: the other fields of `streambp_fx.Options`.

    Raises:
        ValueError: an option is unknown or has a value that is not allowed.
    """

    def __init__(self, chunk: int | str = "auto", *, verbose: bool = False, **options: Any) -> None:
        Options.parse({"chunk": chunk, **options})
        self._settings = {"chunk": chunk, "verbose": verbose, **options}
        self._transformed: nn.Module | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        """Transform the trainer's model.

        Raises:
            CaptureError: it is not a causal language model.
        """
        self.close()
        self._go_first(sys._getframe(1).f_locals.get("self"))
        if model is not None and schedules(model) is None:
            self._transformed = transform(model, **self._settings)

    def _go_first(self, handler: Any) -> None:
        """Take the first place among the callbacks of the trainer, which is asked before those that log."""
        if isinstance(handler, CallbackHandler) and self in handler.callbacks:
            handler.callbacks.remove(self)
            handler.callbacks.insert(0, self)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        """Add the peak and the chunk to an entry of the log."""
        largest = _largest(schedules(model) or []) if model is not None else None
        if logs is None or largest is None:
            return
        found: dict[str, float] = dict(zip((PEAK, CHUNK), largest, strict=True))
        logs.update(found)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(found)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restore the model. A warning says if no step was streamed."""
        found = status(self._transformed) if self._transformed is not None else None
        self.close()
        if found is not None and not found.streamed_steps:
            warn(f"no step of this training was streamed: {found.why_not}")

    def close(self) -> None:
        """Restore the model, if this callback has transformed it. To be called after training that raised."""
        model, self._transformed = self._transformed, None
        if model is not None:
            restore(model)


def _largest(found: list[Schedule]) -> tuple[int, int] | None:
    """Peak activation bytes, and rows of a chunk, of the step that took most."""
    steps = [s.peak_of_steps() for s in found]
    return max((s for s in steps if s is not None), default=None)
