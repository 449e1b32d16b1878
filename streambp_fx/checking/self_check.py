"""The self-check of a compiled graph: one short step as it was captured, and one as it is streamed.

NOTE [translation validation]: an op rule, a pass or a kernel that is wrong gives wrong gradients without a
word. Each claim is proved when a graph is compiled, but by code that may be wrong. So before the first result
of a compiled graph is returned, the very programs that will run are run on a short sequence, with the model's
own weights, and compared with the graph as Dynamo captured it, run whole by autograd. Nothing is compiled for
it that a step would not compile, no state of the model or of PyTorch changes, and of the gradients only a few
numbers are kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import os
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from ..auto_executor import AutoExecutor
from ..errors import CompileError, OffloadError, StreamBPError
from ..passes.graph.facts import Facts, Reach, tensors_of
from ..passes.graph.kernel_settings import plain_attention
from ..passes.graph.purity import is_random
from ..passes.rules.asking import STRICT
from ..passes.s2_prove.independent_samples import batch_size
from ..passes.s4_trace.cudnn_blocks import BLOCK_ATTENTION
from ..runtime.executor import Executor
from ..runtime.segments.own_rows import alone
from ..runtime.step_kinds import StepKind
from .drawn_factors import probabilities_of, wrong_draws
from .dropout import SMOOTH, Drawn, Trial
from .first_wrong_op import APART, Blame, blame
from .result import OF_KINDS, SelfCheck
from .rounding import RTOL, Noise, Rounding, TooRough
from .same_random_numbers import Drawing, comparable
from .short_choices import Choices
from .short_inputs import Cut, ShortSizes
from .short_steps import Difference, Outcome, run
from .try_claims import contradicted

log = logging.getLogger(__name__)
LAZY_LEFT_OUT = "gradients of logits that are computed when read: rows are left out"
# What need not be checked of every kind of step: the claims, outputs that are computed when read, dropout.
CLAIMS, LAZY, DROPOUT = PARTS = ("claims", "lazy", "dropout")


class Unchecked(Exception):
    """Nothing can be compared; says why."""


class CheckFault(BaseException):
    """The check has a bug, where `STREAMBP_STRICT` is set (in tests). Else it is in the log.

    It is no `Exception`, so that what keeps a user's step from failing does not keep a test from failing.
    """


def _strictly(error: Exception) -> None:
    if os.environ.get(STRICT):
        raise CheckFault(f"{type(error).__name__}: {error}") from error


def self_check(
    module: GraphModule,
    executor: Executor | AutoExecutor,
    inputs: Sequence[Any],
    kind: StepKind,
    parts: Collection[str] = PARTS,
) -> SelfCheck:
    """Check a compiled graph on a short sequence.

    Args:
        module: the Dynamo graph, which is what is meant.
        executor: what will run it.
        inputs: of the real step. Nothing about them changes.
        kind: of the real step.
        parts: what is checked beside a step of this kind, see `PARTS`.

    Returns:
        what was found; an error within the check itself is "unchecked", and is in the log.

    Raises:
        CompileError: a program could not be made.
        OffloadError: there is no room to keep values in.
    """
    start = time.perf_counter()
    try:
        with _apart(executor, inputs) as drawing:
            found = _Check(module, executor, inputs, kind, parts, drawing).result()
    except Unchecked as reason:
        found = SelfCheck("unchecked", reason=str(reason))
    except (CompileError, OffloadError):
        raise
    except Exception as error:
        _strictly(error)
        log.warning("a graph could not be checked", exc_info=True)
        found = SelfCheck("unchecked", reason=f"the check failed: {type(error).__name__}: {error}")
    return dataclasses.replace(found, seconds=time.perf_counter() - start)


@contextlib.contextmanager
def _apart(executor: Executor | AutoExecutor, inputs: Sequence[Any]) -> Iterator[Drawing]:
    """Within: nothing that a check does is seen outside of it."""
    several = executor.executors if isinstance(executor, AutoExecutor) else {executor.policy: executor}
    largest = {e: e.largest for e in several.values()}
    devices = {v.device for v in inputs if isinstance(v, Tensor)}
    try:
        quiet, plain = warnings.catch_warnings(), plain_attention(inputs)
        with quiet, alone(), plain, comparable(executor.facts, devices) as drawing:
            warnings.simplefilter("ignore")
            yield drawing
    finally:
        for own in several.values():  # one may have been made for the check
            own.largest = largest.get(own)


class _Check:
    """One check.

    Args:
        module, executor, inputs, kind, parts: see `self_check`.
        drawing: switches dropout on.
    """

    def __init__(
        self,
        module: GraphModule,
        executor: Executor | AutoExecutor,
        inputs: Sequence[Any],
        kind: StepKind,
        parts: Collection[str],
        drawing: Drawing,
    ) -> None:
        self.module, self.inputs, self.kind = module, inputs, kind
        self.parts, self.drawing, self.noise = parts, drawing, Noise()
        self.executor = executor.storing(kind.policy)
        self.facts: Facts = executor.facts
        real = self.executor.sizes(inputs)
        cut = Cut(self.facts, inputs, real, batch_size(self.facts))
        self.cut, self.choices = cut, Choices(self.executor, cut, kind, self.fixed)
        # Values that a step computes when they are read; a gradient may be refused where they are padding.
        self.lazy = frozenset(self.facts.lazy)
        self.dropped = self.lazy - self.executor.parts.lazy.keys()

    def result(self) -> SelfCheck:
        sizes, given, expected = self._reference()
        kind = self.choices.kind_of(sizes, given)
        checked = SelfCheck("agrees", sizes.rows, sizes.samples, sizes.chunk, kind=kind)
        for constant in self._rounds(expected, kind):
            try:
                found = self._streamed(sizes, given, constant)
            except (StreamBPError, MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                log.info("the streamed run of a self-check failed", exc_info=True)
                reason = f"the streamed step failed: {type(error).__name__}: {error}"
                return self._failed(checked, reason, sizes, given, raised=True)
            if constant != self.lazy:
                expected = self._run(self.module, given, constant)
            worst, wrong = self._compare(sizes, given, expected, found, constant)
            checked = dataclasses.replace(checked, difference=max(worst, checked.difference))
            if wrong:
                return self._failed(checked, self._words(wrong[0]), sizes, given)
        wrong = self._differs_on_others(sizes, given, kind) if CLAIMS in self.parts else []
        if wrong:
            return self._failed(checked, f"on other data {self._words(wrong[0])}", sizes, given)
        claim = contradicted(self.facts, given, sizes) if CLAIMS in self.parts else None
        if claim is not None:
            return dataclasses.replace(checked, status="differs", **vars(claim))
        drawn = self._drawn(sizes, given, kind)
        if drawn.ok is False:
            return dataclasses.replace(checked, status="differs", reason=f"with dropout, {drawn.reason}")
        return dataclasses.replace(checked, left_out=tuple(self._left_out(sizes, kind, drawn)))

    def _rounds(self, expected: Outcome, kind: StepKind | None) -> Iterator[frozenset[int]]:
        """Outputs that are not differentiated: what is computed when read; all but one; what is dropped.

        What others alone are made of has no gradient where one is differentiated: so each number is, without
        the others; where there is none the first output. Those rounds and the last do for the first.
        """
        losses = [k for k in expected.roots if expected.outputs[k].dim() == 0] or expected.roots[:1]
        alone = losses if len(expected.roots) > 1 else []
        every = self.executor.parts.lazy and LAZY in self.parts and kind is not None and not kind.behind
        if not (alone and every):
            yield self.lazy
        for loss in alone:
            yield frozenset(range(len(expected.outputs))) - {loss}
        if every:
            yield self.dropped

    # ---- the two runs

    def _reference(self) -> tuple[ShortSizes, list[Any], Outcome]:
        """Short sizes and inputs on which the captured graph has something finite to compare with."""
        reasons: list[str] = []
        for (sizes, given), change in itertools.product(self.choices.first(), (self.choices.varied, list)):
            try:
                values = change(given())
                expected = self._run(self.module, values, self.lazy)
            except Exception as error:
                log.info("the captured graph does not run on %d rows", sizes.rows, exc_info=True)
                reasons.append(f"on {sizes.rows} rows it fails: {type(error).__name__}: {error}")
                continue
            if expected.usable:
                return sizes, values, expected
            reasons.append(f"on {sizes.rows} rows its loss or gradient is not finite, or zero")
        raise Unchecked(reasons[0] if reasons else "its capture assumed sizes that no short sequence has")

    @cached_property
    def fixed(self) -> frozenset[int]:
        """Positions of parameters that no step changes."""
        parameters = (k for k, v in enumerate(self.inputs) if isinstance(v, torch.nn.Parameter))
        return frozenset(k for k in parameters if k not in self.executor.written.positions)

    def _streamed(self, sizes: ShortSizes, given: Sequence[Any], constant: Collection[int]) -> Outcome:
        return self._run(self._call(sizes), given, constant)

    def _differs_on_others(
        self, sizes: ShortSizes, given: list[Any], kind: StepKind | None
    ) -> list[Difference]:
        """What differs in a step of the same kind on other data, and of other sizes if there is one: nothing
        that is kept of one step may be used in the next, and no size may be that of the first. What is kept
        by size would be used in a second step of those sizes."""
        try:
            other = self.choices.other_sizes(sizes) if kind is not None else None
            if other is not None:
                self._streamed(other, self.cut.to(other), self.lazy)
            every = self.choices.others(sizes, given) if kind is not None else ()
            of_the_kind = ((s, values) for s, values in every if self.choices.kind_of(s, values) == kind)
            sizes, others = next(of_the_kind, (sizes, None))
            if others is None:
                return []
            expected, found = (
                self._run(call, others, self.lazy) for call in (self.module, self._call(sizes))
            )
        except Exception:  # such a step would say so
            log.info("a short step on other data failed", exc_info=True)
            return []
        return self._compare(sizes, others, expected, found, self.lazy)[1] if expected.usable else []

    def _run(self, call: Callable[..., Any], given: Sequence[Any], constant: Collection[int]) -> Outcome:
        return run(call, given, self.fixed, self.dropped, constant)

    def _call(self, sizes: ShortSizes) -> Callable[..., list[Any]]:
        return functools.partial(self.executor, rows=sizes.chunk, loss_rows=sizes.loss_chunk)

    def _drawn(self, sizes: ShortSizes, given: Sequence[Any], kind: StepKind | None) -> Drawn:
        """Dropout, see NOTE [dropout in a self-check]."""
        if DROPOUT not in self.parts or not any(is_random(n) for n in self.facts.nodes):
            return Drawn(True)
        with self.drawing():
            run(self._call(sizes), given, self.fixed, skipped=self.lazy, wanted=())
            known, most = probabilities_of(self.facts.nodes), 2 if self._fills_first(kind) else 1
            wrong = next(wrong_draws(self.drawing.draws, known, most), None)
        if wrong is not None:
            return Drawn(False, wrong)
        dtype = max(self._dtypes(given), key=RTOL.__getitem__, default=torch.float32)
        if dtype not in SMOOTH:
            return Drawn(None, "in half precision its loss is too rough")
        own = (given, self.fixed, self.lazy, RTOL[dtype], dtype)
        streamed, captured = Trial(self._call(sizes), *own), Trial(self.module, *own)
        with self.drawing():
            found = streamed.result()
            if found.ok is False:
                meant = captured.result()
                log.debug("with dropout: %s; the captured graph: %s", found, meant)
                if not meant.ok:
                    return Drawn(None, "the gradient of the graph itself is not that of its loss")
            elif not any(streamed.differing()) and all(captured.differing()):
                return Drawn(False, "steps are the same whatever they draw")
        return found

    def _fills_first(self, kind: StepKind | None) -> bool:
        """True if some segment makes its states before it runs its chunks: what is before them runs twice."""
        full = kind is None or bool(kind.full)
        return full or any(s.reach is Reach.FULL or s.chained for s in self.facts.segments)

    # ---- comparing

    def _compare(
        self,
        sizes: ShortSizes,
        given: Sequence[Any],
        expected: Outcome,
        found: Outcome,
        constant: Collection[int],
    ) -> tuple[float, list[Difference]]:
        """The largest relative difference, and those that are more than rounding."""
        again = functools.partial(self._run, given=given, constant=constant)
        rounding = Rounding(self.module, again, sizes.pieces, *self._tolerances(given), self.noise)
        try:
            relative, beyond = rounding.beyond(expected, found)
        except TooRough:
            raise Unchecked("rounding alone changes its gradients as much") from None
        return max(relative.values(), default=0.0), beyond

    def _tolerances(self, given: Sequence[Any]) -> tuple[float, float]:
        """Relative differences that rounding may make in the finest and in the coarsest dtype of the step."""
        known = [RTOL[d] for d in self._dtypes(given)] or [RTOL[torch.float32]]
        return min(known), max(known)

    def _dtypes(self, given: Sequence[Any]) -> set[torch.dtype]:
        """Those of the step whose rounding is known."""
        devices = {v.device.type for v in given if isinstance(v, Tensor)}
        dtypes = {v.dtype for v in given if isinstance(v, Tensor) and v.dtype in RTOL}
        dtypes |= {torch.get_autocast_dtype(d) for d in devices if torch.is_autocast_enabled(d)}
        dtypes |= {v.dtype for n in self.facts.nodes for v in tensors_of(n)}
        return {d for d in dtypes if d in RTOL}

    # ---- words

    def _failed(
        self, checked: SelfCheck, reason: str, sizes: ShortSizes, given: list[Any], raised: bool = False
    ) -> SelfCheck:
        """The first segment and op that differ; of a step that has `raised` its error says what is wrong."""
        try:
            where = contradicted(self.facts, given, sizes)
            if where is None and not raised:
                where = blame(self.module, self.executor, given, sizes, self.fixed)
        except Exception as error:
            _strictly(error)
            log.info("what differs could not be found", exc_info=True)
            where = None
        if where is None:
            where = Blame(reason)
        elif where.segment is None and where.reason.startswith(APART):
            where = dataclasses.replace(where, reason=f"{reason}; {where.reason}")
        return dataclasses.replace(checked, status="differs", **vars(where))

    def _words(self, difference: Difference) -> str:
        if difference.words:
            return f"{difference.what}: {difference.words}"
        share = difference.gap / difference.scale if difference.scale else math.inf
        return f"{difference.what} differs by {share:.1e} of its norm"

    def _ops_that_run(self) -> Iterator[set[Any]]:
        """The ops of each program that is traced by now."""
        for runner in self.executor.runners:
            for traces in () if runner is None else runner.programs.traces.values():
                yield from ({n.target for n in t.module.graph.nodes} for t in traces)

    def _left_out(self, sizes: ShortSizes, kind: StepKind | None, drawn: Drawn) -> Iterator[str]:
        if kind is None or not kind.covers(self.kind):
            yield f"steps with {self.kind}, in part: {OF_KINDS}"
        windows = {int(s.window): s.index for s in self.facts.segments if s.window is not None}
        longer = sorted(w for w in windows if w > sizes.rows)
        if longer:
            yield f"windows of {', '.join(map(str, longer))} rows, longer than the short sequence"
        if self.executor.parts.lazy and LAZY in self.parts and (kind is None or kind.behind):
            yield LAZY_LEFT_OUT
        if any(BLOCK_ATTENTION in ops for ops in self._ops_that_run()):
            yield "cuDNN's attention, which takes blocks that are larger than those of a short step"
        if self.executor.shares.group is not None:
            yield "what several devices exchange, since each checks by itself"
        if drawn.ok is None:
            yield f"what dropout draws: {drawn.reason}"
        yield "what only shows at other sizes"
