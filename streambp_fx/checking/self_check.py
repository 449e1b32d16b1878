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
import logging
import math
import os
import time
import warnings
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from ..auto import AutoExecutor
from ..errors import StreamBPError
from ..passes.batch import batch_size
from ..passes.ir import Facts, tensors_of
from ..passes.rules.asking import STRICT
from ..runtime.executor import Executor
from .blame import Blame, blame
from .claims import contradicted
from .randomness import comparable
from .result import SelfCheck
from .runs import Difference, Noisy, Outcome, differences, run
from .short import Cut, Sizes, candidates

log = logging.getLogger(__name__)
# Relative differences that rounding may make, by dtype; above it, rounding is measured.
RTOL = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 1e-2}
# Share of the norm of the whole gradient below which that of an input is no scale of its own.
VANISHING = 1e-3
# A difference of so many times what noise makes is none of rounding, see NOTE [rounding as noise].
BEYOND = 2.0
# Noise, as a share of the norm of the whole gradient, above which nothing can be told.
DEAF = 0.5
# Short sizes on which running the captured graph is tried.
TRIED = 4


class Unchecked(Exception):
    """Nothing can be compared; says why."""


class CheckFault(BaseException):
    """The check has a bug, where `STREAMBP_STRICT` is set (in tests). Else it is in the log.

    It is no `Exception`, so that what keeps a user's step from failing does not keep a test from failing.
    """


def _strictly(error: Exception) -> None:
    if os.environ.get(STRICT):
        raise CheckFault(f"{type(error).__name__}: {error}") from error


def self_check(module: GraphModule, executor: Executor | AutoExecutor, inputs: Sequence[Any]) -> SelfCheck:
    """Check a compiled graph on a short sequence.

    Args:
        module: the Dynamo graph, which is what is meant.
        executor: what will run it.
        inputs: of the real step. Nothing about them changes.

    Returns:
        what was found; an error within the check itself is "unchecked", and is in the log.

    Raises:
        StreamBPError: a program could not be made, or there is no room to keep values in.
    """
    start = time.perf_counter()
    try:
        with _apart(executor, inputs):
            found = _Check(module, executor, inputs).result()
    except Unchecked as reason:
        found = SelfCheck("unchecked", reason=str(reason))
    except StreamBPError:
        raise
    except Exception as error:
        _strictly(error)
        log.warning("a graph could not be checked", exc_info=True)
        found = SelfCheck("unchecked", reason=f"the check failed: {type(error).__name__}: {error}")
    return dataclasses.replace(found, seconds=time.perf_counter() - start)


@contextlib.contextmanager
def _apart(executor: Executor | AutoExecutor, inputs: Sequence[Any]) -> Iterator[None]:
    """Within: nothing that a check does is seen outside of it."""
    executors = list(executor.executors.values()) if isinstance(executor, AutoExecutor) else [executor]
    largest = [(e, e.largest) for e in executors]
    devices = {v.device for v in inputs if isinstance(v, Tensor)}
    try:
        with warnings.catch_warnings(), comparable(executor.facts, devices):
            warnings.simplefilter("ignore")
            yield
    finally:
        for own, before in largest:
            own.largest = before


class _Check:
    """One check.

    Args:
        module, executor, inputs: see `self_check`.
    """

    def __init__(self, module: GraphModule, executor: Executor | AutoExecutor, inputs: Sequence[Any]) -> None:
        self.module, self.inputs = module, inputs
        policy = executor.choice(inputs).policy if isinstance(executor, AutoExecutor) else executor.policy
        self.executor = executor.storing(policy)
        self.facts: Facts = executor.facts
        real = self.executor.sizes(inputs)
        self.batch = batch_size(self.facts)
        self.cut = Cut(self.facts, inputs, real, self.batch)
        self.real = real
        # Values that a step computes when they are read; a gradient may be refused where they are padding.
        self.lazy = frozenset(self.facts.lazy)

    def result(self) -> SelfCheck:
        sizes, given, expected = self._reference()
        checked = SelfCheck("agrees", sizes.rows, sizes.samples, sizes.chunk)
        for constant in self._rounds(expected):
            try:
                found = self._streamed(sizes, given, constant)
            except (StreamBPError, MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                log.info("the streamed run of a self-check failed", exc_info=True)
                reason = f"the streamed step failed: {type(error).__name__}: {error}"
                return self._failed(checked, reason, sizes, given)
            if constant != self.lazy:
                expected = run(self.module, given, self.fixed, constant=constant)
            worst, wrong = self._compare(given, expected, found, constant)
            checked = dataclasses.replace(checked, difference=max(worst, checked.difference))
            if wrong:
                return self._failed(checked, self._words(wrong[0]), sizes, given)
        claim = contradicted(self.facts, given, sizes)
        if claim is not None:
            return dataclasses.replace(checked, status="differs", **vars(claim))
        return dataclasses.replace(checked, left_out=tuple(self._left_out(sizes)))

    def _rounds(self, expected: Outcome) -> Iterator[frozenset[int]]:
        """Outputs that are not differentiated: of all that can be, and of the loss among them alone."""
        yield self.lazy
        losses = [k for k in expected.roots if expected.outputs[k].dim() == 0]
        if losses and len(expected.roots) > 1:
            yield frozenset(range(len(expected.outputs))) - {losses[0]}

    # ---- the two runs

    def _reference(self) -> tuple[Sizes, list[Any], Outcome]:
        """Short sizes and inputs on which the captured graph has something finite to compare with."""
        reasons: list[str] = []
        for sizes in self._sizes():
            for redraw in (False, True):
                try:
                    given = self.cut.to(sizes, redraw)
                    expected = run(self.module, given, self.fixed, constant=self.lazy)
                except Exception as error:
                    log.info("the captured graph does not run on %d rows", sizes.rows, exc_info=True)
                    reasons.append(f"on {sizes.rows} rows it fails: {type(error).__name__}: {error}")
                    break
                if expected.usable:
                    return sizes, given, expected
                reasons.append(f"on {sizes.rows} rows its loss or gradient is not finite, or zero")
        raise Unchecked(reasons[0] if reasons else "its capture assumed sizes that no short sequence has")

    def _sizes(self) -> Iterator[Sizes]:
        """Short sizes that the graph was captured for."""
        count = 0
        for sizes in candidates(self.real, self.cut.sequence, self.batch):
            if count < TRIED and all(
                test(*(sizes.values[s] for s in symbols)) for symbols, test in self.executor.guards
            ):
                count += 1
                yield sizes

    @cached_property
    def fixed(self) -> frozenset[int]:
        """Positions of parameters that no step changes."""
        parameters = (k for k, v in enumerate(self.inputs) if isinstance(v, torch.nn.Parameter))
        return frozenset(k for k in parameters if k not in self.executor.written.positions)

    def _streamed(self, sizes: Sizes, given: Sequence[Any], constant: Collection[int]) -> Outcome:
        def call(*inputs: Any) -> list[Any]:
            return self.executor(*inputs, rows=sizes.chunk, loss_rows=sizes.chunk)

        return run(call, given, self.fixed, constant=constant)

    # ---- comparing

    def _compare(
        self, given: Sequence[Any], expected: Outcome, found: Outcome, constant: Collection[int]
    ) -> tuple[float, list[Difference]]:
        """The largest relative difference, and those that are more than rounding."""
        every = list(differences(expected, found))
        rtol, floor = self._rtol(given), VANISHING * expected.total
        relative = {d: d.relative(floor) for d in every}
        beyond = [d for d in every if relative[d] > rtol]
        if beyond and all(math.isfinite(d.gap) for d in beyond):
            beyond = self._beyond_noise(given, expected, relative, beyond, constant)
        return max(relative.values(), default=0.0), beyond

    def _beyond_noise(
        self,
        given: Sequence[Any],
        expected: Outcome,
        relative: dict[Difference, float],
        suspects: list[Difference],
        constant: Collection[int],
    ) -> list[Difference]:
        """Those that rounding does not make. See NOTE [rounding as noise]."""
        floor = VANISHING * expected.total
        noise: dict[tuple[bool, int], float] = {}
        whole = 0.0
        for seed in range(2):
            noisy = run(Noisy(self.module, seed).run, given, self.fixed, constant=constant)
            every = list(differences(expected, noisy))
            whole = max(whole, math.hypot(*(d.gap for d in every if d.is_gradient)))
            for d in every:
                noise[d.key] = max(noise.get(d.key, 0.0), d.relative(floor))
        log.debug("noise %s", [(d.what, relative[d], noise.get(d.key)) for d in suspects])
        beyond = [d for d in suspects if relative[d] > BEYOND * noise.get(d.key, 0.0)]
        if not beyond and not whole <= DEAF * expected.total:
            raise Unchecked("rounding alone changes its gradients as much")
        return beyond

    def _rtol(self, given: Sequence[Any]) -> float:
        devices = {v.device.type for v in given if isinstance(v, Tensor)}
        dtypes = {v.dtype for v in given if isinstance(v, Tensor) and v.dtype in RTOL}
        dtypes |= {torch.get_autocast_dtype(d) for d in devices if torch.is_autocast_enabled(d)}
        dtypes |= {v.dtype for n in self.facts.nodes for v in tensors_of(n)}
        return max((RTOL[d] for d in dtypes if d in RTOL), default=RTOL[torch.float32])

    # ---- words

    def _failed(self, checked: SelfCheck, reason: str, sizes: Sizes, given: list[Any]) -> SelfCheck:
        """The first segment and op that differ."""
        try:
            where = contradicted(self.facts, given, sizes) or blame(
                self.module, self.executor, given, sizes, self.fixed
            )
        except Exception as error:
            _strictly(error)
            log.info("what differs could not be found", exc_info=True)
            where = None
        where = where or Blame(reason)
        return dataclasses.replace(checked, status="differs", **vars(where))

    def _words(self, difference: Difference) -> str:
        if difference.words:
            return f"{difference.what}: {difference.words}"
        share = difference.gap / difference.scale if difference.scale else math.inf
        return f"{difference.what} differs by {share:.1e} of its norm"

    def _left_out(self, sizes: Sizes) -> Iterator[str]:
        windows = {int(s.window): s.index for s in self.facts.segments if s.window is not None}
        longer = sorted(w for w in windows if w > sizes.rows)
        if longer:
            yield f"windows of {', '.join(map(str, longer))} rows, longer than the short sequence"
        yield "what only shows at other sizes"
