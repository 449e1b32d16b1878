"""What is left open is chosen by the cost model: chunk, memory policy, chunk of the loss head."""

from __future__ import annotations

import bisect
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import Tensor

from .choosing.saving import Space
from .cost.step import StepCost
from .errors import warn
from .options import AUTO_CHUNK, CHUNK_SIZES, LONGER_CHUNKS, Options, chunk_sizes
from .passes.graph.facts import Facts
from .passes.s3_cut.policy import Policy, candidates
from .passes.s6_schedule.step_parts import StepParts
from .passes.step.saving import Saving
from .runtime.executor import Executor, tokens_of
from .runtime.sharded_parameters import GraphGroups
from .runtime.step_kinds import StepKind
from .runtime.written_inputs import WrittenInputs
from .units import readable

log = logging.getLogger(__name__)
# Of what is free: allocators keep some of it in pieces, and others want some, too.
SHARE = 0.8
# One choice serves lengths up to the next multiple of this: ragged batches do not choose again and again.
STEP = 1024
# Before the first step of an optimizer such as Adam not all that is free is filled: it will take two states
# for each gradient.
OPTIMIZER_STATES = 2
# A longer chunk on a GPU may raise the peak of a step to this multiple.
LONGER_PEAK = 1.3
# A smaller chunk is taken where it leaves less to be computed again, by more than this share of all of it.
LITTLE = 0.02


def choose_rows(
    peak: Callable[[int], int], budget: int | None, tokens: int, sizes: Sequence[int] = CHUNK_SIZES
) -> int:
    """The largest of `sizes` with which a step fits.

    Larger chunks are no faster, and smaller ones than the smallest are slower; so it is the smallest if none
    fits.

    Args:
        peak: peak activation bytes for a number of rows.
        budget: bytes that activations may take; None: there is no limit.
        tokens: sequence length.
        sizes: rows that are tried, the most first.
    """
    if budget is None or tokens <= sizes[-1]:
        return AUTO_CHUNK
    return next((rows for rows in sizes if peak(rows) <= budget), sizes[-1])


@dataclass(frozen=True)
class Choice:
    """What is chosen for a length: a memory policy, and rows of a chunk of a layer and of the loss head."""

    policy: Policy
    rows: int
    loss_rows: int


class AutoExecutor:
    """A compiled graph whose chunk, loss chunk or memory policy is chosen: once for each length (to the next
    `STEP`).

    NOTE [what devices choose]: each device chooses for its own length and memory, without asking the others.
    Where parameters are gathered from pieces, what is chosen must not change in which order: segments that
    are run again together gather theirs in another order. So `every` is not chosen then. With chunks first
    all gradients come at the end, and what reduces them as they come (DeepSpeed) has to see one order in all
    processes. So that is not chosen where there are several.

    Args:
        facts: facts of the graph.
        options: `memory` is the budget; without one, a share of what is free on the device.
        chosen: called with the options that were chosen, and with the rows of a loss chunk.
        stored: see `Executor`.
    """

    def __init__(
        self,
        facts: Facts,
        options: Options,
        chosen: Callable[[Options, int], None],
        stored: GraphGroups | None = None,
    ) -> None:
        self.facts, self.options, self.chosen, self.stored = facts, options, chosen, stored
        self.fills = options.chooses and options.mesh is None
        self.policies = [options.stored]
        if options.chooses:
            self.policies = candidates(options.stored, self.fills, chunks_first=not _has_others())
        if (stored is not None and stored.taken) or options.mesh is not None:  # NOTE [what devices choose]
            self.policies = [p for p in self.policies if p.every == options.stored.every]
        first = Executor(facts, options.storing(self.policies[0]), stored=stored)
        self.executors = {self.policies[0]: first}
        self.costs: dict[Policy, StepCost] = {}
        self.choices: dict[tuple[int, ...], Choice] = {}
        self.space: Space | None = None

    @property
    def sweeps(self) -> int:
        """Sweeps over the loss head in a training step: 1 or 2, or 0 if the graph has no loss."""
        return self.executors[self.policies[0]].sweeps

    @property
    def parts(self) -> StepParts:
        """What the smallest step is made of."""
        return self.executors[self.policies[0]].parts

    @property
    def written(self) -> WrittenInputs:
        """Inputs that the model changes in place."""
        return self.executors[self.policies[0]].written

    @property
    def largest(self) -> tuple[int, int, tuple[tuple[sympy.Symbol, int], ...]] | None:
        """Of the largest step so far, see `Executor`."""
        found = (e.largest for e in self.executors.values() if e.largest is not None)
        return max(found, key=tokens_of, default=None)

    def accepts(self, inputs: Sequence[Any]) -> bool:
        """True if what the graph's capture assumed about sizes holds for these inputs."""
        return self.executors[self.policies[0]].accepts(inputs)

    def tokens(self, inputs: Sequence[Any]) -> int:
        """Tokens of a sequence."""
        return self.executors[self.policies[0]].tokens(inputs)

    def __call__(self, *inputs: Any, first: Callable[[StepKind], None] | None = None) -> list[Any]:
        """Run a step; `first` as in `Executor`."""
        found = self.choice(inputs)
        return self.storing(found.policy)(*inputs, rows=found.rows, loss_rows=found.loss_rows, first=first)

    def choice(self, inputs: Sequence[Any]) -> Choice:
        """What is chosen for inputs of the graph, parameters among them."""
        sizes = self.executors[self.policies[0]].sizes(inputs)
        tokens = sizes[self.facts.sequence]  # type: ignore[index]
        others = {s: v for s, v in sizes.items() if s != self.facts.sequence}
        up_to = -(-tokens // STEP) * STEP
        key = (torch.is_grad_enabled(), up_to, *others.values())
        if key not in self.choices:
            length = up_to if tokens > STEP else tokens
            policy, rows = self._choose(length, others, inputs)
            found = Choice(policy, rows, self._loss_rows(policy, length, others, rows, inputs))
            found = replace(found, rows=self._longer(found, length, others, inputs))
            self.choices[key] = found
            told = (up_to, policy, found.rows, found.loss_rows)
            log.info("for sequences of up to %d tokens: %s, chunk of %d rows, loss chunk of %d", *told)
            self.chosen(replace(self.options.storing(policy), chunk=found.rows), found.loss_rows)
            self._warn_if_too_small(found, length, others)
        return self.choices[key]

    def _longer(
        self, found: Choice, tokens: int, others: Mapping[sympy.Symbol, int], inputs: Sequence[Any]
    ) -> int:
        """Rows of a chunk of a layer: more than were chosen, if the step's peak is little above what it is.

        NOTE [longer chunks on GPUs]: a GPU takes less time for a few long kernels than for many short ones: a
        step of 16,384 tokens, 8 layers of Qwen3-8B's sizes, takes 0.84 s in chunks of 2048 rows and 0.76 s in
        chunks of 8192, with the same peak, which is in the loss head (one H100, docs/gpu.md). Saving 16 GiB
        spares no time in chunks of 2048 rows, and a seventh in those of 8192 (H200). So where there is
        memory to fill, longer chunks come first.

        Experts need them most: each chunk reads all weights, and makes a gradient as large as they are. In
        chunks of 2048 rows a step of 16,384 tokens of Qwen3-30B-A3B's layers took 1.8 of checkpointing's time
        on an H200. So the peak may be `LONGER_PEAK` of what it would be; for those layers that is still a
        sixth of checkpointing's.
        """
        chosen_for_rows = isinstance(found.policy.save, Saving)  # what is saved of which chunk
        if self.options.chunk != "auto" or chosen_for_rows or _on_cpu(_tensors(inputs)):
            return found.rows
        samples = self.executors[self.policies[0]].sequences(others)
        peak = functools.partial(self._peak, found.policy, tokens, others, loss_rows=found.loss_rows)
        longer = (n // samples for n in LONGER_CHUNKS if found.rows < n // samples and found.rows < tokens)
        least, budget = peak(found.rows), self._budget(inputs)
        most = LONGER_PEAK * least if budget is None else max(least, min(LONGER_PEAK * least, budget))
        return next((rows for rows in longer if peak(rows) <= most), found.rows)

    def _warn_if_too_small(self, found: Choice, tokens: int, others: Mapping[sympy.Symbol, int]) -> None:
        """A warning if the step takes more than the memory that the user has named."""
        budget = self.options.memory_bytes
        if budget is None:
            return
        peak = self._peak(found.policy, tokens, others, found.rows, found.loss_rows)
        if peak > budget:
            auto = "" if self.options.chooses else ', policy="auto"'
            less = f'A smaller chunk{auto} or offload="disk" takes'
            warn(
                f"memory={self.options.memory!r} does not fit a step of {tokens} tokens: by the cost model "
                f"its activations take {readable(peak)} ({found.policy}, chunk {found.rows}, loss chunk "
                f"{found.loss_rows}). The step runs all the same. {less} less"
            )

    def _pieces(self, inputs: Sequence[Any]) -> dict[int, int]:
        return {} if self.stored is None else self.stored.devices(inputs)

    def _loss_rows(
        self,
        policy: Policy,
        tokens: int,
        others: Mapping[sympy.Symbol, int],
        rows: int,
        inputs: Sequence[Any],
    ) -> int:
        """As many rows of the loss head at once as the step has memory for at its peak, wherever that is."""
        sequences = self.executors[self.policies[0]].sequences(others)
        usual, least = self.options.loss_rows(sequences), self.options.least_loss_rows(sequences)
        if tokens <= least or not torch.is_grad_enabled():
            return usual
        peak = functools.partial(self._peak, policy, tokens, others, rows)
        if usual > least:
            budget = self._budget(inputs)
            if budget is not None and peak(usual) > budget:
                return least
        tried = [usual, *self.options.more_loss_rows(sequences)]
        if len(tried) == 1:
            return usual
        return tried[bisect.bisect_right(tried, peak(usual), lo=1, key=peak) - 1]

    def _budget(self, inputs: Sequence[Any]) -> int | None:
        """Bytes that activations may take: as the user says, or of what is free; None: it cannot be told."""
        given = self.options.memory_bytes
        return given if given is not None else activation_budget(_tensors(inputs), self._pieces(inputs))

    def _choose(
        self, tokens: int, others: Mapping[sympy.Symbol, int], inputs: Sequence[Any]
    ) -> tuple[Policy, int]:
        if self.options.chunk != "auto" and len(self.policies) == 1:
            return self.policies[0], self.options.rows
        budget, left_free = self._budget(inputs), 0
        if self.options.memory_bytes is None:
            left_free = OPTIMIZER_STATES * gradients_to_come(_tensors(inputs), self._pieces(inputs))
        rows_tried = self._rows_tried(others, inputs)
        smallest: tuple[int, Policy, int] | None = None
        for policy in self.policies:
            peak = functools.partial(self._peak, policy, tokens, others)
            rows = self.options.rows
            if self.options.chunk == "auto":
                rows = choose_rows(peak, budget, tokens, rows_tried)
            if budget is None or len(self.policies) == 1:
                return policy, rows
            held = peak(rows)
            if held <= budget:
                smaller = [r for r in rows_tried if r < rows] if _on_cpu(_tensors(inputs)) else []
                room = max(held, budget - left_free)
                return self._with_more_saved(policy, tokens, others, [rows, *smaller], room)
            if smallest is None or held < smallest[0]:
                smallest = held, policy, rows
        assert smallest is not None
        return smallest[1:]

    def _rows_tried(self, others: Mapping[sympy.Symbol, int], inputs: Sequence[Any]) -> list[int]:
        """Rows of a chunk that are tried, the most first; see NOTE [longer chunks on GPUs]."""
        if self.options.chunk != "auto":
            return [self.options.rows]
        samples = self.executors[self.policies[0]].sequences(others)
        sizes = chunk_sizes(samples)
        fills_gpu = self.options.chooses and not _on_cpu(_tensors(inputs))
        longer = [n // samples for n in LONGER_CHUNKS if n // samples > sizes[0]] if fills_gpu else []
        return [*longer, *sizes]

    def _with_more_saved(
        self,
        policy: Policy,
        tokens: int,
        others: Mapping[sympy.Symbol, int],
        rows_tried: Sequence[int],
        budget: int,
    ) -> tuple[Policy, int]:
        """A policy that fits, with what the rest of the memory has room for, and the rows of a chunk.

        Smaller chunks leave more room. They are taken where that leaves less to compute again, by more than a
        little. What they spare says nothing: with more chunks there is more to spare. Smaller chunks of the
        loss head leave more room, too; but there each chunk costs time, so the head has as many rows as usual
        first.

        Args:
            rows_tried: of a chunk, the most first, with which the policy fits.
        """
        rows = rows_tried[0]
        if policy != Policy() or not torch.is_grad_enabled() or not self.fills:
            return policy, rows
        cost, tried = self.costs[policy], {}
        usual, fewest = self.options.loss_rows(self.executors[policy].sequences(others)), self._least(others)
        for own in rows_tried:
            head, least = usual, self._peak(policy, tokens, others, own, usual)
            if least > budget and usual > fewest:
                head, least = fewest, self._peak(policy, tokens, others, own, fewest)
            self.space = Space(cost, cost.sizes(tokens, own, others, head), self.space)
            left = self.space.again - self.space.spared[self.space.count(budget - least)]
            tried[own] = self.space, least, left
        most = min(left for *_, left in tried.values()) + LITTLE * tried[rows][0].again
        rows, (space, least, _) = next(t for t in tried.items() if t[1][-1] <= most)
        return space.filled(budget, least), rows

    def _peak(
        self,
        policy: Policy,
        tokens: int,
        others: Mapping[sympy.Symbol, int],
        rows: int,
        loss_rows: int | None = None,
    ) -> int:
        if policy not in self.costs:
            executor = self.storing(policy)
            known = next(iter(self.costs.values()), None)
            self.costs[policy] = StepCost(self.facts, self.options.storing(policy), executor, known)
        cost = self.costs[policy]
        return cost.peak(cost.sizes(tokens, rows, others, loss_rows or self._least(others))).total

    def _least(self, others: Mapping[sympy.Symbol, int]) -> int:
        """Rows of a chunk of the loss head where memory is short."""
        return self.options.least_loss_rows(self.executors[self.policies[0]].sequences(others))

    def storing(self, policy: Policy) -> Executor:
        """The executor with this memory policy."""
        if policy not in self.executors:
            programs = self.executors[self.policies[0]].programs
            self.executors[policy] = Executor(self.facts, self.options.storing(policy), programs, self.stored)
        return self.executors[policy]


def _has_others() -> bool:
    """True if this process is one of several that train together."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return distributed and torch.distributed.get_world_size() > 1


def _on_cpu(tensors: Sequence[Tensor]) -> bool:
    return all(t.device.type == "cpu" for t in tensors)


def _tensors(inputs: Sequence[Any]) -> list[Tensor]:
    return [v for v in inputs if isinstance(v, Tensor)]


def activation_budget(tensors: Sequence[Tensor], pieces: Mapping[int, int] | None = None) -> int | None:
    """Bytes that activations may take: a share of what is free, less the gradients that are still to come.

    Args:
        tensors: inputs of the graph, parameters among them, of any shape and dtype; all are on one device.
        pieces: by `id` of a parameter, in how many pieces it and its gradient are stored, if not in one.

    Returns:
        None where it cannot be told what is free.
    """
    device = tensors[0].device if tensors else torch.device("cpu")
    free = free_bytes(device)
    if free is None:
        return None
    return max(0, int(SHARE * free) - gradients_to_come(tensors, pieces or {}))


def gradients_to_come(tensors: Sequence[Tensor], pieces: Mapping[int, int]) -> int:
    """Bytes of the gradients that trained parameters, of any shape and dtype, do not have yet.

    Args:
        tensors, pieces: as of `activation_budget`.
    """
    leaves = (t for t in tensors if t.is_leaf and t.requires_grad and t.grad is None)
    return sum(t.nbytes // pieces.get(id(t), 1) for t in leaves)


def free_bytes(device: torch.device) -> int | None:
    """Free memory of a device in bytes; None where it cannot be told (neither CUDA nor Linux)."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type != "cpu":
        return None
    known = [v for v in (_available(), _left_to_group()) if v is not None]
    return min(known, default=None)


def _available(path: Path = Path("/proc/meminfo")) -> int | None:
    try:
        lines = dict(line.split(":", 1) for line in path.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def _left_to_group(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What a container's limit leaves, if there is one."""
    try:
        limit, used = ((folder / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return None if limit == "max" else max(0, int(limit) - int(used))
    except (OSError, ValueError):
        return None
