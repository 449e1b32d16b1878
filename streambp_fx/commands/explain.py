"""`streambp-fx explain`: the schedule of a step that is not run, as text, page, picture or program."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import StreamBPWarning
from ..explain import explain
from ..plan import model_on_meta
from ..schedule import Schedule
from ..show.memory_plot import check_picture
from ..show.progress import announced
from ..show.whole_files import check_writable


@dataclass(frozen=True)
class ExplainOptions:
    """What `streambp-fx explain` is asked for.

    Attributes:
        model: a name, a directory with config.json, or a config file, as for `plan`.
        seq_len: tokens of each sequence.
        batch_size: sequences.
        chunk, loss_chunk: rows of a chunk; None: the default.
        dtype: of the weights.
        save, every, offload, offload_rows, order: the memory policy, see `Options`.
        gpus, shard, wrap, reshard_after_forward: several devices, as for `plan`.
        html, plot: files to write, or None.
        code, dot, instructions: print the program, the graph of segments, the instructions of the step.
    """

    model: str
    seq_len: int
    batch_size: int = 1
    chunk: int | None = None
    loss_chunk: int | None = None
    dtype: str = "bfloat16"
    save: str = "inputs"
    every: int = 1
    offload: str = "none"
    offload_rows: bool = False
    order: str = "auto"
    gpus: int | None = None
    shard: str | None = None
    wrap: str = "layers"
    reshard_after_forward: bool = True
    html: str | None = None
    plot: str | None = None
    code: bool = False
    dot: bool = False
    instructions: bool = False


def run_explain(options: ExplainOptions, show: Callable[[str], Any] = print) -> Schedule:
    """Explain a model's step, and show or write what was asked for; without a wish, the schedule as text.

    Raises:
        PlanError: the model is unknown, or the devices are not what can be planned.
        OutputError: a file cannot be written; found out before the work where it can be.
        CaptureError: the model's forward cannot be captured as one graph.
    """
    if options.html is not None:
        check_writable(options.html)
    if options.plot is not None:
        check_picture(options.plot)
    model = model_on_meta(options.model, options.dtype)
    chunks = {"chunk": options.chunk, "loss_chunk": options.loss_chunk}
    given: dict[str, Any] = {k: v for k, v in chunks.items() if v is not None}
    given |= {"save": options.save, "every": options.every, "offload": options.offload}
    given |= {"order": options.order, "offload_rows": options.offload_rows}
    if options != replace(options, gpus=None, shard=None, wrap="layers", reshard_after_forward=True):
        given |= {"gpus": options.gpus, "shard": options.shard, "wrap": options.wrap}
        given["reshard_after_forward"] = options.reshard_after_forward
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StreamBPWarning)  # what it says stands in the schedule
        with announced(f"explaining {options.model}", on_pipes=True):
            schedule = explain(model, options.seq_len, options.batch_size, **given)
    name = Path(options.model).name
    title = f"{name}, {options.dtype}, {options.batch_size} x {options.seq_len:,} tokens"
    if options.html is not None:
        with announced(f"writing {options.html}", on_pipes=True):
            schedule.to_html(options.html, title)
        show(f"wrote {options.html}")
    if options.plot is not None:
        with announced(f"writing {options.plot}", on_pipes=True):
            schedule.plot_memory(options.plot, title)
        show(f"wrote {options.plot}")
    if options.code:
        show(schedule.code())
    if options.dot:
        show(schedule.to_dot())
    if options.instructions:
        show(str(schedule.program))
    printed = options.code or options.dot or options.instructions
    if not (options.html or options.plot or printed):
        show(str(schedule))
    return schedule
