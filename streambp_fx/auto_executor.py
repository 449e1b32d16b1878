"""A compiled graph of which something is left open: what the cost model chooses for each length."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import Tensor

from .choosing.budget import activation_budget, gradients_to_come
from .choosing.step_choice import Choice, Chooser, Terms
from .errors import warn
from .options import Options
from .passes.graph.facts import Facts
from .passes.s3_cut.policy import Policy, candidates
from .passes.s6_schedule.step_parts import StepParts
from .runtime.executor import Executor, tokens_of
from .runtime.several_devices.sharded_parameters import GraphGroups
from .runtime.step_kinds import StepKind
from .runtime.written_inputs import WrittenInputs
from .units import readable

log = logging.getLogger(__name__)
# One choice serves lengths up to the next multiple of this: ragged batches do not choose again and again.
STEP = 1024
# Where `memory` is named, up to the next multiple of this share of the power of two below: little of it is
# left over for want of a choice of one's own.
SHARE_OF_LENGTH = 16
# Before the first step of an optimizer such as Adam not all that is free is filled: it will take two states
# for each gradient.
OPTIMIZER_STATES = 2


class AutoExecutor:
    """A compiled graph whose chunk, loss chunk or memory policy is chosen: once for each length (to the next
    `STEP`, or finer where `memory` is named).

    NOTE [what devices choose]: each device chooses for its own length and memory, without asking the others.
    Where parameters are gathered from pieces, what is chosen must not change in which order: segments that
    are run again together gather theirs in another order. So `every` is not chosen then. With chunks first
    all gradients come at the end, and what reduces them as they come (DeepSpeed) has to see one order in all
    processes. So that is not chosen where there are several.

    Args:
        facts: facts of the graph.
        options: `memory` is the budget; without one, a share of what is free on the device.
        chosen: called with the options that were chosen, the rows of a loss chunk, and what more memory would
            buy, in words.
        stored: see `Executor`.
    """

    def __init__(
        self,
        facts: Facts,
        options: Options,
        chosen: Callable[[Options, int, str], None],
        stored: GraphGroups | None = None,
    ) -> None:
        self.facts, self.options, self.chosen, self.stored = facts, options, chosen, stored
        self.fills = options.chooses and options.mesh is None
        self.policies = [options.stored]
        if options.chooses and options.order != "chunks":
            either = options.order == "auto" and not _has_others()
            self.policies = candidates(options.stored, self.fills, chunks_first=either)
        if (stored is not None and stored.taken) or options.mesh is not None:  # NOTE [what devices choose]
            self.policies = [p for p in self.policies if p.every == options.stored.every]
        first = Executor(facts, options.storing(self.policies[0]), stored=stored)
        self.executors = {self.policies[0]: first}
        self.chooser = Chooser(facts, options, self.policies, first, self.storing, self.fills)
        self.choices: dict[tuple[int, ...], Choice] = {}

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
        above, up_to = self._lengths(tokens)
        key, own = ((torch.is_grad_enabled(), n, *others.values()) for n in (up_to, -tokens))
        if key not in self.choices and own not in self.choices:
            length = tokens if self.options.memory is None and tokens <= STEP else up_to
            terms = replace(self._terms(inputs), tokens=length, above=above, others=others)
            found = self.chooser.choose(terms)
            if tokens < length and self._too_much(found, terms):  # it may fit alone
                key, terms = own, replace(terms, tokens=tokens, above=0)
                found = self.chooser.choose(terms)
            self.choices[key] = found
            told = (terms.tokens, found.policy, found.rows, found.loss_rows)
            log.info("for sequences of up to %d tokens: %s, chunk of %d rows, loss chunk of %d", *told)
            options = replace(self.options.storing(found.policy), chunk=found.rows)
            self.chosen(options, found.loss_rows, found.more)
            self._warn_if_too_small(found, terms)
        return self.choices[own] if own in self.choices else self.choices[key]

    def _lengths(self, tokens: int) -> tuple[int, int]:
        """For which lengths one choice is made: more tokens than the first, and no more than the second."""
        if self.options.memory is None:
            return 0, -(-tokens // STEP) * STEP
        step = max(1, (1 << (tokens.bit_length() - 1)) // SHARE_OF_LENGTH)
        up_to = -(-tokens // step) * step
        return up_to - step, up_to

    def _terms(self, inputs: Sequence[Any]) -> Terms:
        """What steps with these inputs may take."""
        tensors = [v for v in inputs if isinstance(v, Tensor)]
        pieces = {} if self.stored is None else self.stored.devices(inputs)
        budget, left_free = self.options.memory_bytes, 0
        if budget is None:
            budget = activation_budget(tensors, pieces)
            left_free = OPTIMIZER_STATES * gradients_to_come(tensors, pieces)
        training = torch.is_grad_enabled()
        return Terms(0, budget, left_free, on_cpu=_on_cpu(tensors), training=training)

    def _too_much(self, found: Choice, terms: Terms) -> int:
        """Bytes of the step's peak, if that is above the memory that the user has named; else 0."""
        budget = self.options.memory_bytes
        peak = 0 if budget is None else self.chooser.peak(found, terms)
        return peak if budget is not None and peak > budget else 0

    def _warn_if_too_small(self, found: Choice, terms: Terms) -> None:
        """A warning if the step takes more than the memory that the user has named."""
        peak = self._too_much(found, terms)
        if peak:
            auto = "" if self.options.chooses else ', policy="auto"'
            less = f'A smaller chunk{auto} or offload="disk" takes'
            warn(
                f"memory={self.options.memory!r} does not fit a step of {terms.tokens} tokens: by the cost "
                f"model its activations take {readable(peak)} ({found.policy}, chunk {found.rows}, loss "
                f"chunk {found.loss_rows}). The step runs all the same. {less} less"
            )

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
