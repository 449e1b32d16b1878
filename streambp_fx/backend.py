"""The backend "streambp": compiles what Dynamo hands over, for `torch.compile` and for `transform` alike."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import sympy
import torch
from torch.fx import GraphModule

from .auto_executor import AutoExecutor
from .checking.checked_kinds import Record
from .checking.result import SelfCheck
from .checking.self_check import self_check
from .dynamo.attribute_stores import keep_attribute_stores
from .dynamo.branches import as_asked, end_graphs_at_branches, watch_branches
from .dynamo.each_frame import end_graphs_at_numbers, watch_frames
from .dynamo.examples import differentiates, is_on_cpu
from .dynamo.hooks import IN_FORWARD_MODE, MAY_CHANGE, guard_hooks, hook_on_saved_tensors, is_forward_mode
from .dynamo.loops import note_graph, watch_calls, with_compared_loops
from .dynamo.messages import with_ranges
from .dynamo.none_gradients import refuse_none_gradients
from .dynamo.parameter_changes import ParameterChanges, without_changes
from .dynamo.sizes import declare_dynamic, remove_declarations, specialize_floats, trace_again
from .dynamo.skipped_frames import warn_of_skipped_frames
from .dynamo.this_backend import (
    MARK,
    SQUEEZED,
    has_cut_checkpoints,
    is_cut_at_buckets,
    leave_to_python,
    modules_of_frame,
    runs_better_in_python,
    squeezed_by_data,
    unwrapped,
)
from .errors import CompileError, warn
from .models.experts import declare_experts
from .models.padding_masks import trace_padding_masks
from .models.recorded_outputs import trace_recorders
from .models.recurrences import declare_recurrences
from .models.traced_calls import in_the_words_of_the_model
from .options import Options
from .passes import PassError, analyze
from .passes.graph.facts import Facts
from .passes.graph.refusals import BranchError, CheckpointedError, NotPureError, NumberError
from .passes.graph.sources import source_line
from .passes.graph.symbols import Lengths
from .passes.graph.tracing import without_saved_tensors_hooks
from .passes.s1_capture.loops.scans import refuse_loops, with_plain_loops
from .passes.s1_capture.sequence_length import find_lengths, where_read
from .runtime.asked_gradients import HOOKED, is_hooked
from .runtime.executor import Executor
from .runtime.live_objects import Registry
from .runtime.segments.failures import FALL_BACK, TO_EAGER, compile_error
from .runtime.several_devices.parameter_groups import ShardedParameters
from .runtime.several_devices.sharded_parameters import GraphGroups
from .runtime.step_counts import GraphCounts, StepCounts, parameters_of, those_of
from .runtime.step_kinds import StepKind
from .schedule import Schedule
from .sharding.others import DTENSORS, are_dtensors
from .show.progress import announced
from .unstreamed import (
    CUT_AT_BUCKETS,
    HOST_IS_HERE,
    SHARES_MEMORY,
    Otherwise,
    Unstreamed,
    explain_unstreamed,
    unknown_names,
    warn_if_layers_first,
    warn_unchunked,
    why_whole,
)
from .versions.differences import quiet_partitioner

log = logging.getLogger(__name__)
Report = Callable[[Schedule], None]
# NOTE [finding schedules]: what Dynamo compiled belongs to Dynamo. `schedule(model)` finds it again by the
# model's parameters; nothing is kept alive by this set, and nothing is decided by it.
_compiled: Registry[CompiledGraph] = Registry()
# What compiled graphs run in: a memory meter, which Dynamo would refuse around the call from outside.
around: ContextVar[Callable[[], contextlib.AbstractContextManager[Any]]] = ContextVar(
    "streambp_around", default=contextlib.nullcontext
)


def streambp(
    module: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend of `torch.compile(model, backend="streambp", options={...})`.

    Args:
        module: the Dynamo graph.
        example_inputs: its inputs.
        options: fields of `Options`; `logits` is "lazy" unless it is given.
        mode: accepted for the sake of callers that always pass one; it changes nothing.

    Raises:
        ValueError: an option is unknown or has a value that is not allowed.
        CompileError: a pass failed, or DDP's buckets have cut the graph.
    """
    try:
        parsed = _options(options)
        if is_cut_at_buckets():
            raise CompileError(CUT_AT_BUCKETS)
    except (ValueError, CompileError) as error:
        raise unwrapped(error) from None
    modules = list(modules_of_frame())
    if declare_recurrences(modules) | declare_experts(modules):
        trace_again("recurrences as ops, and experts as products")
    try:
        found = compile_graph(module, example_inputs, parsed)
    except (ValueError, CompileError) as error:
        raise unwrapped(error) from error.__cause__
    if isinstance(found, Unstreamed) and (found.in_python or runs_better_in_python(module)):
        leave_to_python(found.why, found.in_python or has_cut_checkpoints(module))
    return with_ranges(module, found)


def _options(given: object) -> Options:
    """The options of a call of `torch.compile`.

    Raises:
        ValueError: they are no dictionary, or one of them is unknown or has a value that is not allowed.
    """
    if given is not None and not isinstance(given, Mapping):
        raise ValueError(f'options must be a dictionary such as {{"chunk": 2000}}, not {given!r}')
    return Options.parse({"logits": "lazy", **(given or {})})


setattr(streambp, MARK, True)
keep_attribute_stores()
refuse_none_gradients()
trace_recorders()
trace_padding_masks()
warn_of_skipped_frames()
quiet_partitioner()
watch_frames(
    lambda frame, compiled: with_compared_loops(frame, lambda: in_the_words_of_the_model(frame, compiled))
)
watch_calls(refuse_loops)
watch_branches()


def compile_graph(
    module: GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    report: Report | None = None,
    declared: Mapping[str, int] | None = None,
    placeless: bool = False,
    otherwise: Otherwise | None = None,
    sharded: ShardedParameters | None = None,
    counts: StepCounts | None = None,
) -> Callable[..., Any]:
    """A callable that runs the graph: streamed if it can be, as it is if there is nothing to stream.

    Args:
        module: the Dynamo graph.
        example_inputs: its inputs.
        options: how to stream.
        report: called with each schedule, and again when it has been checked.
        declared: dims by input name that are likely to be the sequence, the tokens first.
        placeless: where the weights will be is not known: the graph only gets a schedule.
        otherwise: what runs in the place of a graph with a gradient that is not streamed; None: the graph.
        sharded: parameters of which each device stores a piece. A graph cannot run by itself then, so
            `otherwise` has to be given.
        counts: what its steps are counted in; None: in counts of its own, see `counts_of`.

    Raises:
        CompileError: a pass failed, and `options.on_error` is "raise".
    """
    guard_hooks()
    note_graph(module, example_inputs)
    with without_saved_tensors_hooks():  # those of a checkpoint around the model, or of a store
        instead = otherwise or Otherwise(as_asked(with_plain_loops(module)))
        counted = counts or GraphCounts(example_inputs)
        return _compiled_graph(
            module, example_inputs, options, report, declared, placeless, instead, sharded, counted
        )


def _compiled_graph(
    module: GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    report: Report | None,
    declared: Mapping[str, int] | None,
    placeless: bool,
    otherwise: Otherwise,
    sharded: ShardedParameters | None,
    counts: StepCounts,
) -> Callable[..., Any]:
    squeezed = squeezed_by_data(module)
    if squeezed is not None:
        end_graphs_at_numbers()  # does not return if they may
        why = f"the model runs unstreamed: {SQUEEZED} ({source_line(squeezed)})"
        warn(why)
        return Unstreamed(otherwise.run, why, counts, in_python=True)
    if not differentiates(module):
        log.info("no output has a gradient: the graph runs as it is")
        return as_asked(with_plain_loops(module)) if sharded is None else otherwise.run
    lengths = find_lengths(module, options.seq_dim, likely=declared)
    unknown = unknown_names(module, options.seq_dim)
    if not lengths.sequence:
        declare_dynamic(module, example_inputs, options.seq_dim)  # does not return if another trace may help
    if lengths.sequence:
        specialize_floats(module)
    remove_declarations(module, example_inputs)
    if are_dtensors(example_inputs):
        warn(f"the graph runs unstreamed: {DTENSORS}")
        return Unstreamed(otherwise.run, f"the graph runs unstreamed: {DTENSORS}", counts)
    if not lengths.sequence:
        why = explain_unstreamed(module, lengths, unknown)
        return Unstreamed(otherwise.run, f"the graph runs unstreamed: {why}", counts)
    if unknown:
        warn(unknown)
    changes = None
    if sharded is None:
        module, changes = without_changes(module)
    with announced("compiling a graph"):
        compiled = CompiledGraph(
            module, example_inputs, lengths, options, report, placeless, declared, otherwise, sharded, counts,
            changes,
        )  # fmt: skip
    return compiled if compiled.streamed else compiled.versions[0]


class CompiledGraph:
    """One Dynamo graph, streamed.

    It is analysed once, for all sizes that Dynamo keeps open (sequence length, batch size), and again only
    for a call whose sizes are not what tracing assumed.
    """

    def __init__(
        self,
        module: GraphModule,
        example_inputs: Sequence[Any],
        lengths: Lengths,
        options: Options,
        report: Report | None = None,
        placeless: bool = False,
        declared: Mapping[str, int] | None = None,
        otherwise: Otherwise | None = None,
        sharded: ShardedParameters | None = None,
        counts: StepCounts | None = None,
        changes: ParameterChanges | None = None,
    ) -> None:
        self.changes = changes
        self.counts = counts or StepCounts()
        self.stored = None if sharded is None else GraphGroups(sharded, example_inputs)
        self.placeless, self.declared = placeless, declared
        self.otherwise = otherwise or Otherwise(with_plain_loops(module))
        self.may_leave = not isinstance(self.otherwise.run, GraphModule)  # for Python code
        self.module, self.lengths, self.options, self.report = module, lengths, options, report
        self.example_inputs: Sequence[Any] = example_inputs
        # By which of the sizes are equal: what has no streamed version.
        self.unstreamed: dict[tuple[int, ...], Unstreamed] = {}
        self.places = where_read(module, list(lengths.values))
        self.schedules: list[Schedule] = []
        self.checks: dict[Executor | AutoExecutor, Record] = {}
        self.lock = threading.RLock()
        self._parameters = parameters_of(example_inputs)
        self.versions: list[Executor | AutoExecutor | Unstreamed] = [self._compile(lengths)]
        self.example_inputs = ()
        _compiled.add(self)

    @property
    def parameters(self) -> list[weakref.ref[torch.nn.Parameter]]:
        """Those of the models that it has served."""
        return self.counts.parameters if isinstance(self.counts, GraphCounts) else self._parameters

    @property
    def streamed(self) -> bool:
        """True if the graph is streamed for some sizes."""
        return any(not isinstance(v, Unstreamed) for v in self.versions)

    def __call__(self, *inputs: Any) -> Any:
        with without_saved_tensors_hooks():
            version = self._version(inputs)
        if not isinstance(version, Unstreamed) and version.written.overlap(inputs):
            return self._instead(f"the step runs unstreamed: {SHARES_MEMORY}")(*inputs)
        if is_forward_mode():
            return self._instead(IN_FORWARD_MODE)(*inputs)
        if self.may_leave and not isinstance(version, Unstreamed) and is_hooked(version.facts, inputs):
            return self._instead(f"the step runs unstreamed: {HOOKED}")(*inputs)
        hook = hook_on_saved_tensors() if torch.is_grad_enabled() else None
        if hook is not None:
            return self._instead(f"{hook} {MAY_CHANGE}: this step runs unstreamed")(*inputs)
        changes = None if isinstance(version, Unstreamed) else self.changes
        if changes is not None:
            changes.run(inputs)
        try:
            with around.get()():
                if isinstance(version, Unstreamed):
                    return version(*inputs)
                checked = torch.is_grad_enabled() and self.options.check != "never"
                first = functools.partial(self._check, version, inputs) if checked else None
                found = version(*inputs, first=first)
        except CompileError as error:
            position = self.versions.index(version)
            self.versions[position] = instead = self._unstreamed(error)
            if not isinstance(version, Unstreamed):
                self.checks[version].schedule.unstreamed = instead.why
            if changes is not None:  # they are done, and the graph is without them
                instead = dataclasses.replace(instead, run=with_plain_loops(self.module))
            return instead(*inputs)
        if torch.is_grad_enabled():
            self.counts.note(inputs=inputs)
        return found

    def _check(self, version: Executor | AutoExecutor, inputs: Sequence[Any], kind: StepKind) -> None:
        """Before the first result of a kind of step in training: is it right on a short sequence?

        It is checked again if the first sequence was shorter than that, and another is twice as long.

        Raises:
            CompileError: it is not.
        """
        with self.lock, without_saved_tensors_hooks():
            record, tokens = self.checks[version], version.tokens(inputs)
            if self.options.check == "first" and record.has(kind, tokens):
                return
            is_first, schedule = not record.ways, record.schedule
            found = self._checked(version, inputs, kind, record.missing(tokens))
            record.note(kind, tokens, found)
        if self.report is not None and is_first:
            self.report(schedule)
        for line in found.lines():
            log.info("%s (%.1f s)", line, found.seconds)
        if not found.ok:
            raise CompileError(f"{found.failure()} {FALL_BACK}")

    def _checked(
        self, version: Executor | AutoExecutor, inputs: Sequence[Any], kind: StepKind, parts: Collection[str]
    ) -> SelfCheck:
        module = with_plain_loops(self.module)
        if self.stored is None:
            return self_check(module, version, inputs, kind, parts)
        with self.stored.resting():
            return self_check(module, version, self.stored.with_stand_ins(inputs), kind, parts)

    def _version(self, inputs: Sequence[Any]) -> Executor | AutoExecutor | Unstreamed:
        """What runs these inputs; made where there is none for their sizes.

        NOTE [sizes that become different]: which sizes are the sequence is read from those that are equal
        (`sequence_length`, NOTE [one sequence length]), and may be others in another call: the rows of an
        encoder were as many as the tokens, and are no longer.
        """
        version = next((v for v in self.versions if v.accepts(inputs)), None)
        if version is not None:
            return version
        sizes = self._sizes(inputs)
        alike = _alike(sizes)
        version = self.unstreamed.get(alike)
        if version is None:
            lengths = find_lengths(self.module, self.options.seq_dim, sizes, self.declared)
            version = self._compile(lengths)
            if isinstance(version, Unstreamed):
                self.unstreamed[alike] = version
            else:
                self.versions.append(version)
        return version

    def _sizes(self, inputs: Sequence[Any]) -> dict[sympy.Symbol, int]:
        found = (int(inputs[k] if d is None else inputs[k].shape[d]) for k, d in self.places)
        return dict(zip(self.lengths.values, found, strict=True))

    def _compile(self, lengths: Lengths) -> Executor | AutoExecutor | Unstreamed:
        if not lengths.sequence:
            return self._instead(f"the graph runs unstreamed for these sizes: {lengths.reason}")
        try:
            return self._streamed(lengths)
        except CompileError as error:
            return self._unstreamed(error)

    def _unstreamed(self, error: CompileError) -> Unstreamed:
        """The graph as it is, with a warning, if that is what the user wants of an internal error."""
        if self.options.on_error == "raise":
            raise error
        return self._instead(f"the graph runs unstreamed: {error}".replace(f" {TO_EAGER}", ""))

    def _instead(self, why: str) -> Unstreamed:
        """What runs in the place of the graph; a warning says why."""
        warn(why)
        return Unstreamed(self.otherwise.run, why, self.counts)

    def _streamed(self, lengths: Lengths) -> Executor | AutoExecutor | Unstreamed:
        examples = [n.meta.get("example_value") for n in self.module.graph.nodes if n.op == "placeholder"]
        try:
            facts = analyze(self.module, examples, lengths, self.options.logits)
            if not self.may_leave and is_hooked(facts, self.example_inputs):
                raise PassError("branches", BranchError(HOOKED))
            facts.placeless = self.placeless
            if self.stored is not None:
                facts.parameter_groups = self.stored.nodes(facts)
                facts.not_again_groups = self.stored.forward_only
                facts.several = self.stored.several(facts)
        except PassError as error:
            if isinstance(error.cause, NumberError):
                end_graphs_at_numbers()  # does not return if they may
            if isinstance(error.cause, BranchError):
                end_graphs_at_branches()  # likewise
            if isinstance(error.cause, NotPureError):
                line = f" ({source_line(error.cause.node)})" if error.cause.node is not None else ""
                found = self._instead(f"the model runs unstreamed: {error.cause.reason}{line}")
                return dataclasses.replace(
                    found, in_python=isinstance(error.cause, (CheckpointedError, BranchError))
                )
            raise compile_error(error) from error
        long = self.otherwise.is_better(facts)
        if long is not None:
            return self._instead(f"the graph runs unstreamed, layer by layer: {why_whole(long)}")
        if self.options.offload == "host" and not self.placeless and is_on_cpu(examples):
            warn(HOST_IS_HERE)
        self.options = self.options.for_graph(facts)
        schedule = Schedule(facts, self.options)
        if facts.segments:
            executor = self._executor(facts, schedule)
            schedule.sweeps, schedule.executor = executor.sweeps, executor
            asked = self.options.order == "chunks" and any(map(facts.trains, facts.segments))
            if asked:
                warn_if_layers_first(schedule)
            self.checks[executor] = Record(schedule)
        self.schedules.append(schedule)
        if self.report is not None:
            self.report(schedule)
        if not facts.segments:
            why = "nothing of it depends on both parameters and the sequence"
            if facts.sequence is None:
                why = "its sequence length became a constant when the graph was traced"
            return self._instead(f"the graph runs unstreamed: {why}")
        warn_unchunked(facts)
        return executor

    def _executor(self, facts: Facts, schedule: Schedule) -> Executor | AutoExecutor:
        options = self.options
        chosen = "auto" in (options.chunk, options.loss_chunk)
        open_choice = chosen or options.chooses or options.memory is not None
        try:
            if open_choice and any(s.mixings for s in facts.segments):
                return AutoExecutor(facts, self.options, schedule.choose, self.stored)
            return Executor(facts, self.options, stored=self.stored)
        except Exception as error:
            raise CompileError(f"the schedule could not be built: {error}. {FALL_BACK}") from error


def _alike(sizes: Mapping[sympy.Symbol, int]) -> tuple[int, ...]:
    """Which sizes are equal, and which are 0 or 1: a number for each, the same for equal ones."""
    values = list(sizes.values())
    return tuple(v if v < 2 else values.index(v) + 2 for v in values)


def schedules_of(module: torch.nn.Module) -> list[Schedule]:
    """Schedules of all compiled graphs that read a parameter of `module`, in the order of compilation."""
    found = those_of(module, _compiled)
    return [s for c in sorted(found, key=lambda c: c.schedules[0].number) for s in c.schedules]
