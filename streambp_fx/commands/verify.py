"""`streambp-fx verify`: a model from this machine, verified on one batch, as a table or as JSON."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..errors import VerificationError
from ..models.loading import LoadedModel, check_source, english_tokens, load_model
from ..show.progress import announced
from ..verify import verify
from ..verifying.result import Verification

# No multiple of a chunk, a head size or a block of a kernel; long enough for several chunks.
SEQ_LEN = 261


@dataclass(frozen=True)
class VerifyOptions:
    """What `streambp-fx verify` runs.

    Attributes:
        model: a source for `load_model`.
        seq_len: tokens of each sequence; None: 261, or what the model has positions for if that is less.
        batch_size: sequences in the batch.
        chunk, loss_chunk: rows of a chunk of a layer and of the loss head; None: as `verify` chooses.
        dtype: of the weights.
        as_json: print JSON instead of tables.
    """

    model: str
    seq_len: int | None = None
    batch_size: int = 1
    chunk: int | None = None
    loss_chunk: int | None = None
    dtype: str = "float32"
    as_json: bool = False


def run_verify(options: VerifyOptions, console: Console | None = None) -> Verification:
    """Load the model, verify it on one batch of English (or random) tokens, and print what was found.

    Raises:
        ModelSourceError: there is no such model.
        VerificationError: it cannot be verified: the batch is longer than its positions, for example.
        StreamBPError: it cannot be captured.
    """
    check_source(options.model)
    console = console or Console(highlight=False)
    started = time.perf_counter()
    with contextlib.redirect_stderr(io.StringIO()):  # loaders draw progress bars
        loaded = load_model(options.model, getattr(torch, options.dtype), tokenizer=True)
    ids = _tokens(options, loaded)
    given: dict[str, Any] = {"loss_chunk": options.loss_chunk} if options.loss_chunk is not None else {}
    try:
        with announced(f"verifying {options.model}", on_pipes=True):
            found = verify(
                loaded.model, {"input_ids": ids, "labels": ids.clone()}, chunk=options.chunk, **given
            )
    except VerificationError as error:
        most = _positions(loaded)
        if most is None or ids.shape[1] <= most:
            raise
        raise VerificationError(
            f"{error} (--seq-len {ids.shape[1]}, but the model has {most} positions)"
        ) from error
    if options.as_json:
        text = {"source": loaded.title, "dtype": options.dtype, "source_notes": list(loaded.notes)}
        json.dump({**text, **found.as_dict()}, sys.stdout, indent=2, allow_nan=False)
        sys.stdout.write("\n")
        return found
    words = "English text" if loaded.tokenizer is not None else "random tokens"
    for note in (*loaded.notes, *found.notes):
        console.print(f"note: {note}", markup=False)
    print_verification(found, console, f"{loaded.title}, {options.dtype}, {words}")
    console.print(f"{time.perf_counter() - started:.0f} s in all")
    return found


def _tokens(options: VerifyOptions, loaded: LoadedModel) -> torch.Tensor:
    """Token ids, int64 (batch_size, seq_len)."""
    length = options.seq_len
    if length is None:
        length = min(SEQ_LEN, _positions(loaded) or SEQ_LEN)
    count = options.batch_size * length
    ids = english_tokens(loaded.tokenizer, count, vocab_size=loaded.vocab_size)
    return ids.view(options.batch_size, length)


def _positions(loaded: LoadedModel) -> int | None:
    """How many positions the model's config speaks of, if it does."""
    most = getattr(loaded.model.config, "max_position_embeddings", None)
    return most if isinstance(most, int) and most > 1 else None


def print_verification(found: Verification, console: Console, title: str) -> None:
    """Two tables, and below them whatever is wrong."""
    console.print(f"{title}: {found.title}", markup=False, soft_wrap=True)
    console.print(_step_table(found))
    console.print(_probe_table(found))
    for line in found.gradient_lines():
        console.print(line, markup=False, soft_wrap=True)
    for line in found.contradiction_lines():
        console.print(f"contradicted: {line}", markup=False, soft_wrap=True)
    for line in found.not_claimed_lines():
        console.print(f"not claimed: {line}", markup=False, soft_wrap=True)
    console.print(Text(found.verdict, style="bold green" if found.ok else "bold red"), soft_wrap=True)


def _step_table(found: Verification) -> Table:
    """The loss, and the gradients that differ most."""
    table = Table(title="One training step, streamed against eager", caption=found.gradient_line())
    table.add_column("", overflow="fold")
    for name in ("eager", "streamed", "relative difference"):
        table.add_column(name, justify="right", no_wrap=True)
    if found.loss is not None:
        eager, streamed, relative = found.loss.eager, found.loss.streamed, found.loss.relative
        table.add_row("loss", f"{eager:.6f}", f"{streamed:.6f}", f"{relative:.1e}")
    largest = sorted(found.gradients, key=lambda g: g.relative, reverse=True)
    for check in largest[:3]:
        table.add_row(check.parameter, f"norm {check.norm:.2e}", "", f"{check.relative:.1e}")
    return table


def _probe_table(found: Verification) -> Table:
    table = Table(title="Independence of rows: what the analysis claims, and what execution says")
    for name in ("segments", "kind", "values", "result", "a row reads"):
        table.add_column(name, justify="right" if name == "values" else "left")
    for where, kind, values, result, words in found.segment_rows():
        style = "red" if "contradicted" in result else "green" if result == "confirmed" else ""
        table.add_row(where, kind, values, Text(result, style=style), Text(words))
    table.caption = found.probe_line()
    return table
