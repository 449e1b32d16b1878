"""What a streamed step holds where it holds most, by cause: measured, predicted, and the least it could be.

python -m benchmarks.causes --case dense,dense-512,long

The step runs, and bytes are counted op by op (`timeline`). There are two tables for a case: where most is
held within a layer, and where most is held in the loss head; the larger of the two is the peak. Floors:

- stored inputs, hidden states and their gradients, keys and values and theirs: see `cases.floors_per_token`;
- attention outputs: the rows that queries have, and a log-sum-exp in float32 for each head;
- parameter gradients: those of the segment that runs, once, in the weights' dtype, which autograd gets whole;
  and those of a head whose weight is the embedding's too, which autograd keeps until it has both parts;
- chunk bodies and loss: of the program that runs, what is alive in every order of its operations.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import streambp_fx
from streambp_fx.cost.held_bytes import CAUSES, KEPT, PARAMETERS, STATE, STATE_GRADIENTS, Moment
from streambp_fx.models.loading import load_model, random_tokens
from streambp_fx.passes.cost.program import Memory
from streambp_fx.passes.s5_lower.lower import Lowered
from streambp_fx.schedule import Schedule

from .cases import ELEMENT, Case, Workload, cases_named, floors_per_token, head_size, shrunk
from .errors import BenchmarkError
from .measuring import Meter
from .modes import MODES, Mode, Setup
from .tables import MIB, new_table, number
from .timeline import Span, recorded

LAYER, HEAD = "in a layer", "in the loss head"


@dataclass(frozen=True)
class Held:
    """What is held at one moment, in bytes by cause.

    Attributes:
        where: `LAYER` or `HEAD`.
        measured, predicted: the moment at which most is held there.
        floor: the least that can be; causes without a floor are missing.
    """

    where: str
    measured: Moment
    predicted: Moment
    floor: dict[str, int]


def held(model: torch.nn.Module, workload: Workload, options: dict[str, Any]) -> list[Held]:
    """Run a streamed step of a model and say what it held; the model is left as it was.

    Args:
        model: on the CPU or a GPU; its gradients are made if there are none.
        workload: tokens, chunk, batch and dtype of the step, and the config for the floors.
        options: of `streambp_fx.transform`, without `chunk`.
    """
    options = {"chunk": workload.chunk, **options}
    device = next(model.parameters()).device
    vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator, union-attr]
    ids = random_tokens(vocabulary, workload.tokens * workload.batch).view(workload.batch, -1).to(device)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    known = [t for p in model.parameters() for t in (p, p.grad) if t is not None]
    streambp_fx.transform(model, **options)
    try:
        _step(model, ids)
        gc.collect()
        with recorded([*known, *model.buffers(), ids]) as timeline:
            _step(model, ids)
        schedule = streambp_fx.schedule(model)
    finally:
        streambp_fx.restore(model)
    assert schedule is not None
    found = []
    sizes = schedule.cost.sizes(workload.tokens, loss_chunk=schedule.loss_rows)
    predicted = schedule.cost.timeline(sizes)
    for where in (LAYER, HEAD):
        those = _segments(schedule, where)
        span = max((s for s in timeline.spans if s.segment in those), key=lambda s: sum(s.alive.values()))
        expected = max((m for m in predicted if m.segment in those), key=lambda m: m.total)
        floor = floors(schedule, workload, span)
        found.append(Held(where, timeline.moment(span), expected, floor))
    return found


def _step(model: torch.nn.Module, ids: torch.Tensor) -> None:
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()


def _segments(schedule: Schedule, where: str) -> set[int]:
    """Segments that carry a state from chunk to chunk, or the last one, which does not."""
    segments = schedule.facts.segments
    if where == HEAD:
        return {segments[-1].index}
    return {s.index for s in segments if s.mixings}


def floors(schedule: Schedule, workload: Workload, span: Span) -> dict[str, int]:
    """The least that can be held in a stretch of the step, by cause; nothing is offloaded."""
    config, segment = workload.config, schedule.facts.segments[span.segment]
    assert config is not None, "a case with a config"
    tokens = workload.tokens * workload.batch
    found = {cause: size * tokens for cause, size in floors_per_token(config, workload.dtype).items()}
    if not segment.mixings:
        found[STATE] = found[STATE_GRADIENTS] = 0
    if schedule.options.save == "attention":
        heads, size = config["num_attention_heads"], ELEMENT[workload.dtype]
        found[KEPT] = config["num_hidden_layers"] * heads * (head_size(config) * size + 4) * tokens
    cost, sizes = schedule.cost, schedule.cost.sizes(workload.tokens)
    later = (n for s in schedule.facts.segments[segment.index + 1 :] for n in s.constants)
    weights = {*segment.constants, *(n for n in later if cost.first_use[n] < segment.index)}
    found[PARAMETERS] = sum(cost.bytes_of(n, sizes) for n in weights & schedule.facts.needs_grad)
    if span.lowered is not None:
        found[span.cause] = least(span.lowered, span.numbers or {})
    return found


def least(lowered: Lowered, numbers: dict[str, int]) -> int:
    """Bytes that a program holds over its inputs in whatever order its operations run.

    While an operation runs, a value is alive that was made by one that must come before it (or by itself),
    and is read by one that must come after it (or by itself). The operation where these are most gives a
    bound that no order goes below.

    Args:
        lowered: the program.
        numbers: sizes of a call, by the names that `lowered.sizes` gives them.
    """
    sizes = {symbol: numbers[name] for symbol, name in lowered.sizes.items() if name in numbers}
    memory = Memory(lowered.module.graph, sizes)  # type: ignore[arg-type]
    position = {node: k for k, node in enumerate(memory.nodes)}
    before = [0] * len(memory.nodes)  # bit sets of positions
    for k, node in enumerate(memory.nodes):
        for operand in node.all_input_nodes:
            before[k] |= before[position[operand]] | 1 << position[operand]

    def alive(key: int, at: int) -> bool:
        made = memory.storages.made[key]
        if made != at and not before[at] >> made & 1:
            return False
        return made == at or any(r == at or before[r] >> at & 1 for r in memory.storages.readers[key])

    sizes_of = {key: int(size) for key, size in memory.bytes.items() if size != 0}
    return max(sum(size for key, size in sizes_of.items() if alive(key, k)) for k in range(len(memory.nodes)))


# ---- for people


def table(title: str, found: Held) -> Table:
    """Causes of one moment, in MiB."""
    made = new_table(title, "held for", "measured", "predicted", "floor", "of floor")
    measured, predicted, floor = found.measured.bytes, found.predicted.bytes, found.floor
    causes = [c for c in CAUSES if measured.get(c) or predicted.get(c)]
    rows: list[tuple[str, float, float, float | None]]
    rows = [(c, measured.get(c, 0), predicted.get(c, 0), floor.get(c)) for c in causes]
    rows.append(("together", found.measured.total, found.predicted.total, sum(floor.values())))
    for name, *values in rows:
        share = values[0] / values[2] if values[2] else None  # type: ignore[operator]
        made.add_row(name, *(number(v and v / MIB, ",.1f") for v in values), number(share))
    return made


def measure(case: Case, console: Console) -> None:
    """Print the tables of a case, and the peak of a process that runs its step (Linux)."""
    workload, mode = case.workload, MODES[case.mode]
    with Meter(Setup()).opened() as meter:
        model = load_model(meter.source(workload), getattr(torch, workload.dtype)).model
        found = held(model, workload, dict(mode.options))
        del model
        for each in found:
            console.print(table(f"{case.name}, {each.where}: {workload.title}, {mode.label}", each))
        peak, most = peak_of_process(workload, mode, meter), max(each.measured.total for each in found)
        console.print(
            f"A process takes {peak / MIB:,.1f} MiB for this step over weights and gradients: "
            f"{(peak - most) / MIB:+,.1f} for kernels and the allocator.\n"
        )


def peak_of_process(workload: Workload, mode: Mode, meter: Meter) -> int:
    """Peak bytes over weights and gradients of a process that runs the step.

    Raises:
        BenchmarkError: the process failed.
    """
    meter.measure([(workload, mode)], time=False)
    result = meter.result(workload, mode)
    if result.peak_bytes is None:
        raise BenchmarkError(f"no peak of {workload.title}: {result.reason}")
    return result.peak_bytes


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; prints the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.causes", description=__doc__.split("\n")[0])
    parser.add_argument("--case", metavar="NAME,NAME", default="dense")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the machinery")
    args = parser.parse_args(argv)
    console = Console(width=max(110, Console().width))
    for case in cases_named(args.case.split(",")):
        measure(shrunk(case) if args.tiny else case, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
