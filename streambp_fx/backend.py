"""The backend "streambp": compiles what Dynamo hands over, for `torch.compile` and for `transform` alike."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import warnings
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
from .dynamo.hooks import MAY_CHANGE, guard_hooks, hook_on_saved_tensors
from .dynamo.live_objects import Registry
from .dynamo.sizes import declare_dynamic, remove_declarations, specialize_floats, trace_again
from .dynamo.this_backend import MARK, is_cut_at_buckets, modules_of_frame
from .errors import CompileError, StreamBPWarning
from .models.experts import declare_experts
from .models.recorded_outputs import trace_recorders
from .models.recurrences import declare_recurrences
from .options import Options
from .passes import PassError, analyze
from .passes.graph.facts import Facts, Segment
from .passes.graph.functionalization import NotPureError
from .passes.graph.sources import source_line, source_name
from .passes.graph.symbols import Lengths
from .passes.rules.asking import op_name
from .passes.s1_capture.sequence_length import find_lengths, is_called, lengths_read, where_read
from .passes.s2_prove.axes import is_secondary
from .passes.s4_trace.vjp import without_saved_tensors_hooks
from .runtime.executor import Executor
from .runtime.parameter_groups import ShardedParameters
from .runtime.segments.failures import FALL_BACK, REPORT, compile_error
from .runtime.sharded_parameters import GraphGroups
from .runtime.step_kinds import StepKind
from .schedule import Schedule
from .show.progress import announced
from .unstreamed import Otherwise, Unstreamed

log = logging.getLogger(__name__)
Report = Callable[[Schedule], None]
# NOTE [finding schedules]: what Dynamo compiled belongs to Dynamo. `schedule(model)` finds it again by the
# model's parameters; nothing is kept alive by this set, and nothing is decided by it.
_compiled: Registry[CompiledGraph] = Registry()
CUT_AT_BUCKETS = (
    "Dynamo has cut the graph where a bucket of DistributedDataParallel is full, and hands over pieces that "
    "cannot be streamed. Write this before the first step: torch._dynamo.config.optimize_ddp = False. Or use "
    "streambp_fx.transform(model) in the place of torch.compile, which does so by itself."
)
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
    parsed = Options.parse({"logits": "lazy", **(options or {})})
    if is_cut_at_buckets():
        raise CompileError(CUT_AT_BUCKETS)
    modules = list(modules_of_frame())
    if declare_recurrences(modules) | declare_experts(modules):
        trace_again("recurrences as ops, and experts as products")
    return compile_graph(module, example_inputs, parsed)


setattr(streambp, MARK, True)
trace_recorders()


def compile_graph(
    module: GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    report: Report | None = None,
    declared: Mapping[str, int] | None = None,
    placeless: bool = False,
    otherwise: Otherwise | None = None,
    sharded: ShardedParameters | None = None,
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

    Raises:
        CompileError: a pass failed, and `options.on_error` is "raise".
    """
    guard_hooks()
    with without_saved_tensors_hooks():  # those of a checkpoint around the model, or of a store
        instead = otherwise or Otherwise(module)
        return _compiled_graph(module, example_inputs, options, report, declared, placeless, instead, sharded)


def _compiled_graph(
    module: GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    report: Report | None,
    declared: Mapping[str, int] | None,
    placeless: bool,
    otherwise: Otherwise,
    sharded: ShardedParameters | None,
) -> Callable[..., Any]:
    if not _differentiates(module):
        log.info("no output has a gradient: the graph runs as it is")
        return module if sharded is None else otherwise.run
    lengths = find_lengths(module, options.seq_dim, likely=declared)
    _warn_of_unknown_names(module, options.seq_dim)
    if not lengths.sequence:
        declare_dynamic(module, example_inputs, options.seq_dim)  # does not return if another trace may help
    if lengths.sequence:
        specialize_floats(module)
    remove_declarations(module, example_inputs)
    if not lengths.sequence:
        _explain_unstreamed(module, lengths)
        return otherwise.run
    with announced("compiling a graph"):
        compiled = CompiledGraph(
            module, example_inputs, lengths, options, report, placeless, declared, otherwise, sharded
        )
    return compiled if compiled.streamed else otherwise.run


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
    ) -> None:
        self.stored = None if sharded is None else GraphGroups(sharded, example_inputs)
        self.placeless, self.declared = placeless, declared
        self.otherwise = otherwise or Otherwise(module)
        self.module, self.lengths, self.options, self.report = module, lengths, options, report
        # By which of the sizes are equal: what has no streamed version.
        self.unstreamed: dict[tuple[int, ...], Unstreamed] = {}
        self.places = where_read(module, list(lengths.values))
        self.schedules: list[Schedule] = []
        self.checks: dict[Executor | AutoExecutor, Record] = {}
        self.lock = threading.RLock()
        self.parameters = [weakref.ref(v) for v in example_inputs if isinstance(v, torch.nn.Parameter)]
        self.versions: list[Executor | AutoExecutor | Unstreamed] = [self._compile(lengths)]
        _compiled.add(self)

    @property
    def streamed(self) -> bool:
        """True if the graph is streamed for some sizes."""
        return any(not isinstance(v, Unstreamed) for v in self.versions)

    def __call__(self, *inputs: Any) -> Any:
        with without_saved_tensors_hooks():
            version = self._version(inputs)
        if not isinstance(version, Unstreamed) and version.written.overlap(inputs):
            _warn("the step runs unstreamed: an input that is changed in place shares memory with another")
            return self.otherwise.run(*inputs)
        hook = hook_on_saved_tensors() if torch.is_grad_enabled() else None
        if hook is not None:
            _warn(f"{hook} {MAY_CHANGE}: this step runs unstreamed")
            return self.otherwise.run(*inputs)
        try:
            with around.get()():
                if isinstance(version, Unstreamed):
                    return version(*inputs)
                checked = torch.is_grad_enabled() and self.options.check != "never"
                first = functools.partial(self._check, version, inputs) if checked else None
                return version(*inputs, first=first)
        except CompileError as error:
            position = self.versions.index(version)
            self.versions[position] = self._unstreamed(error)
            return self.versions[position](*inputs)

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
        if self.stored is None:
            return self_check(self.module, version, inputs, kind, parts)
        with self.stored.resting():
            return self_check(self.module, version, self.stored.with_stand_ins(inputs), kind, parts)

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
            _warn(f"the graph runs unstreamed for these sizes: {lengths.reason}")
            return Unstreamed(self.otherwise.run)
        try:
            return self._streamed(lengths)
        except CompileError as error:
            return self._unstreamed(error)

    def _unstreamed(self, error: CompileError) -> Unstreamed:
        """The graph as it is, with a warning, if that is what the user wants of an internal error."""
        if self.options.on_error == "raise":
            raise error
        _warn(f"the graph runs unstreamed: {str(error).replace(FALL_BACK, REPORT)}")
        return Unstreamed(self.otherwise.run)

    def _streamed(self, lengths: Lengths) -> Executor | AutoExecutor | Unstreamed:
        examples = [n.meta.get("example_value") for n in self.module.graph.nodes if n.op == "placeholder"]
        try:
            facts = analyze(self.module, examples, lengths, self.options.logits)
            facts.placeless = self.placeless
            if self.stored is not None:
                facts.parameter_groups = self.stored.nodes(facts)
                facts.forward_only_groups = self.stored.forward_only
                facts.several = self.stored.several(facts)
        except PassError as error:
            if isinstance(error.cause, NotPureError):
                line = f" ({source_line(error.cause.node)})" if error.cause.node is not None else ""
                _warn(f"the model runs unstreamed: {error.cause.reason}{line}")
                return Unstreamed(self.otherwise.run)
            raise compile_error(error) from error
        long = self.otherwise.is_better(facts)
        if long is not None:
            _warn(f"the graph runs unstreamed, layer by layer: {_why_whole(long)}")
            return Unstreamed(self.otherwise.run)
        schedule = Schedule(facts, self.options)
        if facts.segments:
            executor = self._executor(facts, schedule)
            schedule.sweeps, schedule.executor = executor.sweeps, executor
            self.checks[executor] = Record(schedule)
        self.schedules.append(schedule)
        if self.report is not None:
            self.report(schedule)
        if not facts.segments:
            why = "nothing of it depends on both parameters and the sequence"
            if facts.sequence is None:
                why = "its sequence length became a constant when the graph was traced"
            _warn(f"the graph runs unstreamed: {why}")
            return Unstreamed(self.otherwise.run)
        _warn_unchunked(facts)
        return executor

    def _executor(self, facts: Facts, schedule: Schedule) -> Executor | AutoExecutor:
        open_choice = "auto" in (self.options.chunk, self.options.loss_chunk, self.options.policy)
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
    own = {id(p) for p in module.parameters()}
    found = [c for c in _compiled if any(r() is not None and id(r()) in own for r in c.parameters)]
    return [s for c in sorted(found, key=lambda c: c.schedules[0].number) for s in c.schedules]


def _differentiates(module: GraphModule) -> bool:
    output = next(n for n in module.graph.nodes if n.op == "output")
    values = (n.meta.get("example_value") for n in output.all_input_nodes)
    leaves = torch.utils._pytree.tree_leaves(list(values))
    return any(isinstance(v, torch.Tensor) and v.requires_grad for v in leaves)


def _warn_of_unknown_names(module: GraphModule, seq_dim: Mapping[str, int] | None) -> None:
    """A warning if a graph that reads along something has none of the inputs that `seq_dim` names."""
    if not seq_dim:
        return
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    own = [n for n in placeholders if isinstance(n.meta.get("example_value"), torch.Tensor)]
    if not lengths_read(module) or any(is_called(n, name) for name in seq_dim for n in own):
        return
    names = [source_name(n) for n in own if not isinstance(n.meta["example_value"], torch.nn.Parameter)]
    _warn(
        f"seq_dim names {', '.join(map(repr, seq_dim))}, but the inputs of this graph are {', '.join(names)}"
    )


def _explain_unstreamed(module: GraphModule, lengths: Lengths) -> None:
    """A warning if the graph reads along something longer than one; without attention, a line in the log."""
    if any(size > 1 for size in lengths_read(module)):
        _warn(f"the graph runs unstreamed: {lengths.reason}")
    else:
        log.info("the graph runs as it is: %s", lengths.reason)


def _warn_unchunked(facts: Facts) -> None:
    """One warning for all regions that run whole, with the op, its source line and the cost."""
    whole = [s for s in facts.segments if not s.chunked and s.refused is not None]
    causes = [s for s in whole if not is_secondary(s.reason or "")]
    lines = list(map(_why_whole, causes or whole))
    if lines:
        unique = list(dict.fromkeys(lines))
        _warn(
            f"{len(lines)} of {len(facts.segments)} segments run unchunked. Their gradients are exact, but "
            "their activations are held for the whole sequence while they are recomputed:\n  "
            + "\n  ".join(unique)
        )


def _why_whole(segment: Segment) -> str:
    """The op for which a segment runs whole, the reason, and the model's line."""
    refused = segment.refused
    if refused is None:
        return segment.reason or "nothing is known of its rows"
    return f"{op_name(refused.target)}: {segment.reason} ({source_line(refused)})"


def _warn(text: str) -> None:
    warnings.warn(text, StreamBPWarning, stacklevel=3)
