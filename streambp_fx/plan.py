"""Does a training step fit: the longest sequence, the chunk, the memory by cause; nothing is run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import sympy
from torch import nn

from .choosing.saving import Space, choose_saving
from .choosing.step_choice import MOST_CHUNKS
from .cost import eager_step
from .cost.held_bytes import CAUSES, CHUNK, LOSS_CHUNK, TOKENS, Moment
from .cost.step import Sizes, StepCost
from .cost.transfers import Transfers, transfers
from .errors import PlanError
from .explain import captured, learned_positions, positions_of
from .models.by_name import check_named, model_on_meta
from .models.known import known_models as known_models
from .options import FEW_ROWS, Options, chunk_sizes
from .passes.s3_cut.policy import Policy, candidates
from .planning.amounts import check_amounts
from .planning.engines import Engine, engine_for
from .planning.memory_and_work import ways_to_run
from .planning.rates import Rates, rates_for
from .planning.several import NOTHING, DevicesPlan, TimePlan, devices_plan, time_plan
from .planning.step_plan import Plan as Plan
from .units import parse_bytes

# Bytes of optimizer state for each byte of trained weights: torch.optim keeps states in the weights' dtype.
OPTIMIZERS = {"none": 0, "sgd": 0, "momentum": 1, "adamw": 2}
LONGEST = 2**31
# A sequence for the capture; what is found holds for all lengths.
SAMPLE_TOKENS = 4096


class Planner:
    """The cost of one model's step for all lengths and chunks; makes plans.

    Args:
        model: a causal language model; weights may be on meta.
        batch_size: sequences in the batch.
        loss_chunk: rows in a chunk of the loss head.
        stored: the memory policy.
        engine: that shares the model between several devices; None: there is one.
        rates: of the devices, for the time of a step; None: it is not asked for.
    """

    def __init__(
        self,
        model: nn.Module,
        batch_size: int = 1,
        loss_chunk: int | None = None,
        stored: Policy | None = None,
        engine: Engine | None = None,
        rates: Rates | None = None,
    ) -> None:
        self.batch_size, self.engine, self.rates, self.model = batch_size, engine, rates, model
        self.most_tokens = learned_positions(model) or LONGEST
        self.few_rows: int | None = None
        sample = min(SAMPLE_TOKENS, positions_of(model) or SAMPLE_TOKENS)
        options: dict[str, Any] = {"chunk": max(1, sample // 4), "loss_chunk": loss_chunk or "auto"}
        schedule, nodes = captured(model, sample, batch_size, options)
        self.loss_chunk = schedule.options.loss_rows(batch_size)
        self.least_loss_chunk = schedule.options.least_loss_rows(batch_size)
        if engine is not None:
            engine.share(schedule.facts, model, nodes)
        self.cost = StepCost(schedule.facts, schedule.options)
        if engine is not None and engine.context_parallel > 1:
            self.cost = self.cost.along(engine.context_parallel)
        self.use(stored or Policy())
        parameters = list({id(p): p for p in model.parameters()}.values())
        if engine is not None:
            self.weights, self.gradients = engine.weights(model), engine.gradients(model)
        else:
            self.weights = sum(p.numel() * p.element_size() for p in (*parameters, *model.buffers()))
            self.gradients = sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)
        self.dtype = str(parameters[0].dtype).removeprefix("torch.") if parameters else "float32"

    def use(self, stored: Policy) -> Planner:
        """Plan with another memory policy from now on."""
        self.cost = self.cost.storing(stored)
        self.stored = stored
        vars(self).pop("expression", None)
        vars(self).pop("_peak", None)
        return self

    @cached_property
    def expression(self) -> sympy.Expr:
        """Peak activation bytes in T, chunk and loss_chunk, for this batch size."""
        return self.cost.peak_expression(self.batch_size)

    @cached_property
    def _peak(self) -> Callable[[int, int, int], float]:
        return sympy.lambdify((TOKENS, CHUNK, LOSS_CHUNK), self.expression, "math")

    def activation_peak(self, seq_len: int, chunk: int, loss_chunk: int | None = None) -> int:
        """Peak bytes over weights, gradients and optimizer states.

        Args:
            seq_len: tokens of a sequence.
            chunk: rows of a chunk of a layer.
            loss_chunk: rows of a chunk of the loss head; None: those of a step that is short of memory.
        """
        rows, loss_rows = min(chunk, seq_len), min(loss_chunk or self.least_loss_chunk, seq_len)
        return int(self._peak(seq_len, rows, loss_rows))

    def longest(self, budget: int, chunk: int) -> int:
        """The longest sequence whose activations take at most `budget` bytes; 0 if none does.

        It has no more tokens than the model has positions, where those are learned.
        """
        found = _longest(lambda tokens: self.activation_peak(tokens, chunk), budget)
        return min(found, self.most_tokens)

    def longest_unstreamed(self, budget: int, checkpointing: bool) -> int:
        """The longest sequence, in tokens, whose activations fit unstreamed; 0 if none does.

        Args:
            budget: bytes that activations may take.
            checkpointing: with gradient checkpointing of each layer.
        """
        expression = self.cost.for_batch(
            eager_step.peak_expression(self.cost, checkpointing), self.batch_size
        )
        return min(_longest(sympy.lambdify((TOKENS,), expression, "math"), budget), self.most_tokens)

    def choose_chunk(self, budget: int | None, seq_len: int | None = None) -> int:
        """Rows of a chunk: the largest of `chunk_sizes` with which `seq_len` fits.

        Without a length, the largest that costs no more than 2% of the longest sequence. If nothing fits,
        the smallest, below which kernels lose time. So many as `few_rows`, if that is given.
        """
        sizes = chunk_sizes(self.batch_size) if self.few_rows is None else (self.few_rows,)
        if budget is None:
            return sizes[0]
        if seq_len is not None:
            fitting = (c for c in sizes if self.activation_peak(seq_len, c) <= budget)
            return next(fitting, sizes[-1])
        lengths = {c: self.longest(budget, c) for c in sizes}
        return next(c for c in sizes if lengths[c] >= 0.98 * max(lengths.values()))

    def optimizer_bytes(self, states: int) -> int:
        """Bytes of an optimizer that has so many states for each trained weight."""
        return states * self.gradients if self.engine is None else self.engine.optimizer(self.model, states)

    def _devices(self, moments: list[Moment]) -> DevicesPlan | None:
        return None if self.engine is None else devices_plan(self.engine, self.model, moments)

    def _moved(self, sizes: Sizes) -> Transfers:
        return NOTHING if self.stored.offload == "none" else transfers(self.cost, sizes)

    def _time(
        self, moments: list[Moment], tokens: int, devices: DevicesPlan | None, moving: Transfers
    ) -> TimePlan | None:
        if self.rates is None:
            return None
        after = 0 if devices is None else devices.after_step_bytes
        return time_plan(moments, self.rates, tokens * self.batch_size, self.engine, after, moving)

    def plan(
        self,
        name: str,
        seq_len: int | None = None,
        memory: str | int | None = None,
        chunk: int | None = None,
        optimizer: str = "none",
    ) -> Plan:
        """A plan for one length, or for the longest that fits; see `plan`.

        Raises:
            PlanError: a size, a unit or the optimizer is not allowed, the model has no more positions, or not
                even one chunk fits.
        """
        _check(seq_len, memory, optimizer)
        if seq_len is not None and seq_len > self.most_tokens:
            raise PlanError(f"{name} has {self.most_tokens:,} positions, which are learned: not {seq_len:,}")
        states = self.optimizer_bytes(OPTIMIZERS[optimizer])
        resident = self.weights + self.gradients + states
        budget = None if memory is None else parse_bytes(memory) - resident
        rows = chunk or self.choose_chunk(budget, seq_len)
        longest = None if budget is None else self.longest(budget, rows)
        short = longest is not None and longest < min(rows, seq_len or rows, self.most_tokens)
        if short and seq_len is None:
            raise PlanError(self._too_small(parse_bytes(memory or 0), resident, rows))
        tokens = seq_len if seq_len is not None else longest
        assert tokens is not None
        rows = min(rows, tokens)
        loss_rows = self.loss_chunk
        if budget is not None and self.activation_peak(tokens, rows, loss_rows) > budget:
            loss_rows = self.least_loss_chunk
        sizes = self.cost.sizes(tokens, rows, loss_chunk=loss_rows)
        moments = self.cost.timeline(sizes)
        peak = max(moments, key=lambda m: m.total)
        if short and budget is not None and peak.total > budget:
            raise PlanError(self._too_small(parse_bytes(memory or 0), resident, rows))
        flops = sum(m.flops for m in moments)
        slope = self.activation_peak(2 * tokens, rows) - self.activation_peak(tokens, rows)
        devices, moving = self._devices(moments), self._moved(sizes)
        others = None if budget is None else budget - (0 if devices is None else devices.gathered_peak_bytes)
        return Plan(
            model=name,
            fits=budget is None or peak.total <= budget,
            seq_len=tokens,
            max_seq_len=longest,
            batch_size=self.batch_size,
            chunk=rows,
            loss_chunk=loss_rows,
            policy=str(self.stored),
            dtype=self.dtype,
            memory_bytes=None if memory is None else parse_bytes(memory),
            weights_bytes=self.weights,
            gradients_bytes=self.gradients,
            optimizer_bytes=states,
            activation_peak_bytes=peak.total,
            peak_bytes=resident + peak.total,
            offloaded_bytes=int(self.cost.offloaded(sizes)),
            out_bytes=int(moving.out),
            back_bytes=int(moving.back),
            by_cause={c: int(peak.bytes[c]) for c in CAUSES if c in peak.bytes},
            flops=flops,
            recompute_factor=round(flops * self.cost.devices / eager_step.flops(self.cost, sizes), 4),
            tokens_per_gib=int(2**30 * tokens / slope) if slope > 0 else 0,
            eager_seq_len=None if others is None else self.longest_unstreamed(others, False),
            checkpointing_seq_len=None if others is None else self.longest_unstreamed(others, True),
            peak_expression=str(self.expression),
            flops_expression=str(self.cost.flops_expression(self.batch_size)),
            devices=devices,
            time=self._time(moments, tokens, devices, moving),
            positions=positions_of(self.model),
        )

    def filled(self, plan: Plan, optimizer: str) -> Plan:
        """A plan in which inputs alone are saved, and fit, with as much more as fits."""
        assert plan.memory_bytes is not None
        resident, space = plan.peak_bytes - plan.activation_peak_bytes, self._space(plan)
        ways = ways_to_run(space, resident, self.rates)
        policy = choose_saving(space, plan.memory_bytes - resident, plan.activation_peak_bytes).policy
        asked = plan.model, plan.seq_len, plan.memory_bytes, plan.chunk, optimizer
        found = plan if policy == self.stored else self.use(policy).plan(*asked)
        return replace(found, ways=ways, max_seq_len=plan.max_seq_len, tokens_per_gib=plan.tokens_per_gib)

    def with_frontier(self, plan: Plan) -> Plan:
        """A plan with what memory buys for its length; see `ways_to_run`."""
        if plan.ways is not None:
            return plan
        space = self.use(Policy())._space(plan)
        return replace(
            plan, ways=ways_to_run(space, plan.peak_bytes - plan.activation_peak_bytes, self.rates)
        )

    def _space(self, plan: Plan) -> Space:
        """What may be saved of the step that is planned."""
        return Space(self.cost, self.cost.sizes(plan.seq_len, plan.chunk))

    def _too_small(self, memory: int, resident: int, rows: int) -> str:
        """What is wrong with a budget that not even one chunk fits, and the smallest that would do."""
        least = self.activation_peak(rows, rows)
        if resident > memory:
            largest = "weights" if self.weights >= self.gradients else "gradients"
            what = f"weights, gradients and optimizer states alone take {_gib(resident)} (mostly {largest})"
        else:
            peak = self.cost.peak(self.cost.sizes(max(2, rows), rows))
            what = (
                f"one chunk takes {_gib(least)} more (mostly {max(peak.bytes, key=lambda c: peak.bytes[c])})"
            )
        return f"{_gib(memory)} is too little: {what}. The smallest that works is {_gib(resident + least)}."


def plan(
    model: nn.Module | str | Path,
    seq_len: int | None = None,
    memory: str | int | None = None,
    *,
    chunk: int | None = None,
    loss_chunk: int | None = None,
    batch_size: int = 1,
    dtype: str = "bfloat16",
    lora_rank: int | None = None,
    optimizer: str = "none",
    save: str = "inputs",
    every: int = 1,
    offload: str = "none",
    offload_rows: bool = False,
    order: str = "auto",
    policy: str = "given",
    gpus: int | None = None,
    gpu_memory: str | int | None = None,
    shard: str | None = None,
    wrap: str = "layers",
    reshard_after_forward: bool = True,
    context_parallel: int = 1,
    interconnect: str | float | None = None,
    gpu: str | None = None,
    flops: float | None = None,
    efficiency: float | None = None,
    frontier: bool = False,
) -> Plan:
    """What a streamed training step needs, and whether it fits; nothing is run, no weight is allocated.

    With several devices each of them has a batch of its own: what is said of memory, of the batch and of the
    sequence is said of one device. With `context_parallel` those that share a sequence have one together.

    Args:
        model: a causal language model (its weights may be on meta), or a source for `model_on_meta`.
        seq_len: tokens of each sequence; None: the longest that fits `memory`.
        memory: budget of the device in bytes or as text ("80GiB"); None: only say what is needed.
        chunk: rows of a chunk; None: chosen.
        loss_chunk: rows of a chunk of the loss head; None: the default of `transform`.
        batch_size: sequences in the batch.
        dtype: of the weights, for a model that is given by name.
        lora_rank: train LoRA adapters of this rank, for a model that is given by name.
        optimizer: one of `OPTIMIZERS`, whose states stay on the device.
        save, every, offload, offload_rows, order, policy: the memory policy, see `Options`. With "auto" and a
            length: the policy with the least work that fits; with "auto" and no length: that with the longest
            sequence.
        gpus: how many devices share the model; None: there is one.
        gpu_memory: another name of `memory`.
        shard: how they share it: "ddp", "zero1", "zero2", "zero3" or "fsdp2".
        wrap: what `fully_shard` is called on beside the model: "layers", or "model" for nothing else.
        reshard_after_forward: of the layers, as in `fully_shard`.
        context_parallel: how many of the devices share each sequence, as with `transform(model, mesh=...)`.
        interconnect: what connects the devices: "nvlink", "pcie", "ib400", or GB/s in one direction. By
            default NVLink where the device has it, and else PCIe.
        gpu: a name in `planning.rates.GPUS`, for the time of a step; by default "H100" with several devices.
            "here": the device of this process, which is measured for some seconds, once.
        flops: floating-point operations a second, instead of those of the data sheet.
        efficiency: the share of that rate that products and attention reach; None: what they did on an H100.
        frontier: also what memory buys, for the length of the plan: `Plan.ways`. With a length and `policy`
            "auto" it is there anyway.

    Raises:
        PlanError: the model is unknown, a size is not allowed, or not even one chunk fits.
    """
    for name, value in (
        ("seq_len", seq_len),
        ("chunk", chunk),
        ("loss_chunk", loss_chunk),
        ("batch_size", batch_size),
    ):
        least = 2 if name == "seq_len" else 1
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise PlanError(f"{name} must be an int of at least {least}, not {value!r}")
    if isinstance(model, nn.Module):
        check_named(True, dtype, lora_rank)  # `model_on_meta` does so for the others
    try:
        options = Options(
            save=save, every=every, offload=offload, offload_rows=offload_rows, order=order, policy=policy
        )
    except ValueError as error:
        raise PlanError(str(error)) from error
    if memory is not None and gpu_memory is not None:
        raise PlanError("memory and gpu_memory are the same: give one of them")
    memory = gpu_memory if memory is None else memory
    _check(seq_len, memory, optimizer)  # before the work
    if policy == "auto" and memory is None:
        raise PlanError('policy="auto" chooses for an amount of memory: give one')
    engine = engine_for(gpus, shard, wrap, reshard_after_forward, context_parallel)
    if frontier and engine is not None:
        raise PlanError("frontier is for one device: leave out gpus and shard")
    named = not isinstance(model, nn.Module)
    built = model if isinstance(model, nn.Module) else model_on_meta(model, dtype, lora_rank)
    title = Path(str(model)).name if named else type(model).__name__
    rates = rates_for(engine is not None, gpu, interconnect, flops, efficiency, _dtype_of(built), offload)
    planner = Planner(built, batch_size, loss_chunk, options.stored, engine, rates)
    asked = title, seq_len, memory, chunk, optimizer
    found = planner.plan(*asked) if policy == "given" else _best(planner, options, asked)
    return planner.with_frontier(found) if frontier else found


def _dtype_of(model: nn.Module) -> str:
    return str(next((p.dtype for p in model.parameters()), "float32")).removeprefix("torch.")


def _best(planner: Planner, options: Options, asked: tuple) -> Plan:
    """The plan of the first policy that fits, or of the one that allows the longest sequence.

    Chunks of few rows are tried where nothing fits with more, as in a step.
    """
    plans: list[Plan] = []
    refused: PlanError | None = None
    single = planner.engine is None or planner.engine.context_parallel == 1
    fills = asked[1] is not None and single
    tried = candidates(options.stored, fills, options.order == "auto" and planner.engine is None)
    if options.order == "chunks":
        tried = [options.stored]
    least, tokens = chunk_sizes(planner.batch_size)[-1], asked[1]
    few = [n for n in FEW_ROWS if n < least and (tokens is None or n < tokens <= n * MOST_CHUNKS)]
    for planner.few_rows, candidate in itertools.product((None, *few), tried):
        if planner.few_rows is not None and (asked[3] is not None or (plans and tokens is None)):
            break
        try:
            plans.append(planner.use(candidate).plan(*asked))
        except PlanError as error:
            refused = refused or error
            continue
        if asked[1] is not None and plans[-1].fits:
            return planner.filled(plans[-1], asked[-1]) if fills and candidate == Policy() else plans[-1]
    if not plans:
        assert refused is not None
        raise refused
    if asked[1] is not None:
        return min(plans, key=lambda p: (p.activation_peak_bytes, p.chunk))
    return max(plans, key=lambda p: p.max_seq_len or 0)


def _check(seq_len: int | None, memory: str | int | None, optimizer: str) -> None:
    if optimizer not in OPTIMIZERS:
        raise PlanError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, not {optimizer!r}")
    check_amounts(seq_len, memory)


def _longest(peak: Callable[[int], float], budget: int) -> int:
    """The greatest length with `peak(length) <= budget`; peaks grow with the length."""
    if peak(2) > budget:
        return 0
    low, high = 2, 4
    while high < LONGEST and peak(high) <= budget:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if peak(middle) <= budget else (low, middle)
    return low


def _gib(count: float) -> str:
    """Rounded up: memory that is said to be enough has to be."""
    if count < 2**20:
        return f"{count:,.0f} bytes"
    unit, name = (2**30, "GiB") if count >= 2**30 else (2**20, "MiB")
    return f"{math.ceil(count / unit * 100) / 100:.2f} {name}"
