"""Each pass over the program of a chunk: what it changes in small programs."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from golden import check_golden
from golden_graphs import (
    FIRST,
    LATER,
    Small,
    Words,
    difference,
    ids,
    lowered,
    names_of_inputs,
    needs_symbols,
    sections,
    stages,
    traced,
)
from recurrent import recurrent
from torch import Tensor

from streambp_fx.passes.graph.facts import Facts
from streambp_fx.passes.pipeline.log import observed
from streambp_fx.passes.pipeline.runner import Pass
from streambp_fx.passes.s4_trace.program_inputs import Extent, input_names
from streambp_fx.passes.s5_lower import lower
from streambp_fx.passes.s5_lower.lower import PROGRAM_PASSES, Lowering
from streambp_fx.passes.s5_lower.programs import SegmentPrograms

pytestmark = needs_symbols


def gated(m: Small, ids: Tensor) -> Tensor:
    x = m.embed(ids)
    return m.head(x + m.second(F.silu(m.first(x)) * x))


def attention(m: Small, ids: Tensor) -> Tensor:
    x = m.embed(ids)
    q, k = m.heads(m.first(x)), m.heads(x)
    read = F.scaled_dot_product_attention(q, k, k, is_causal=True)
    return m.head(x + m.second(read.transpose(1, 2).flatten(2)))


def by_hand(m: Small, ids: Tensor) -> Tensor:
    x, place = m.embed(ids), torch.arange(ids.shape[1])
    scores = m.first(x) @ x.transpose(1, 2) * 0.5
    weights = scores.masked_fill(place > place.unsqueeze(1), float("-inf")).softmax(-1)
    return m.head(x + weights @ x)


def loss(m: Small, ids: Tensor) -> Tensor:
    x = m.embed(ids) * (1 + m.bias)
    return F.cross_entropy(m.head(x).flatten(0, 1), ids.flatten())


@functools.cache
def facts_of(function: Callable[..., Tensor]) -> Facts:
    return stages(Small(function), ids()).facts


def programs_of(function: Callable[..., Tensor], segment: int) -> SegmentPrograms:
    return SegmentPrograms(facts_of(function), facts_of(function).segments[segment])


def recurrence() -> SegmentPrograms:
    """Of the layer: a projection, a selective scan and a sum."""
    found = next(p for p in recurrent().segments if isinstance(p, SegmentPrograms) and p.states)
    return SegmentPrograms(found.facts, found.segment)


# By name: the programs, their kind, the rows of a chunk.
Case = tuple[Callable[[], SegmentPrograms], str, Extent]
LAYER, HEAD = 1, -1
PROGRAMS: dict[str, Case] = {
    "gated, forward": (functools.partial(programs_of, gated, 0), "forward", LATER),
    "gated, joint": (functools.partial(programs_of, gated, 0), "joint", LATER),
    "attention, forward": (functools.partial(programs_of, attention, LAYER), "forward", LATER),
    "attention, joint": (functools.partial(programs_of, attention, LAYER), "joint", LATER),
    "by hand, forward": (functools.partial(programs_of, by_hand, LAYER), "forward", LATER),
    "by hand, joint": (functools.partial(programs_of, by_hand, LAYER), "joint", LATER),
    "by hand, joint of the first chunk": (functools.partial(programs_of, by_hand, LAYER), "joint", FIRST),
    "loss": (functools.partial(programs_of, loss, HEAD), "loss", LATER),
    "recurrence, forward": (recurrence, "forward", LATER),
    "recurrence, joint": (recurrence, "joint", LATER),
}
CASES: dict[str, tuple[str, ...]] = {
    "dead_code": ("gated, joint", "by hand, joint", "loss"),
    "recorded_steps": ("recurrence, forward", "recurrence, joint", "attention, joint"),
    "simplify": ("gated, joint", "attention, joint", "loss"),
    "reorder": ("gated, joint", "attention, forward", "by hand, joint"),
    "rematerialize": ("gated, joint", "attention, joint", "by hand, joint"),
    "write_in_place": ("gated, forward", "attention, joint", "by hand, joint", "loss"),
    "workspace": ("gated, joint", "by hand, joint", "loss"),
    "views": ("gated, forward", "attention, joint", "loss"),
    "names": ("gated, joint", "by hand, forward", "loss"),
}


class Changes:
    """What each pass changes in a program; what comes in is what "accumulate" has made."""

    def __init__(self, case: Case) -> None:
        make, self.kind, self.extent = case
        self.programs, self.words = make(), None
        self.texts: list[tuple[str, str]] = []
        self.names: list[tuple[str, str]] = []

    def found(self, patch: pytest.MonkeyPatch) -> dict[str, str]:
        first = Pass[Any, Any]("given", "nothing", lambda own, _: own)
        patch.setattr(lower, "PROGRAM_PASSES", (PROGRAM_PASSES[0], first, *PROGRAM_PASSES[1:]))
        with observed(self._observe):
            lowered(self.programs, self.kind, self.extent)
        pairs = zip(self.texts, self.texts[1:], strict=False)
        return {name: difference(before, after, name) for (_, before), (name, after) in pairs}

    def _observe(self, name: str, made: Any, seconds: float) -> None:
        if not isinstance(made, Lowering) or name == "accumulate":
            return
        inputs = [n for n in made.module.graph.nodes if n.op == "placeholder"]
        if self.words is None:
            known = names_of_inputs(self.programs)
            names = [known.get(n, n) for n in input_names(self.programs.slots(self.kind))]
            sizes = traced(self.programs, self.kind, self.extent).guards.names
            self.words = Words(sizes, dict(zip(inputs, names, strict=False)))
        text = self.words.graph(made.module.graph)
        if made.product is not None:
            text += f"\nproduct: {self.words.name(made.product)}"
        text = re.sub(r"\bs\d+\b", "B", re.sub(r"#\d+'", "'", text))  # the only size; a number in the process
        self.texts.append((name, text + "\ninputs: " + ", ".join(n.name for n in inputs)))


@pytest.mark.parametrize("name", CASES)
def test_what_a_pass_changes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {case: Changes(PROGRAMS[case]).found(monkeypatch) for case in CASES[name]}
    found = [(case, own.get(name, "# ---- not run")) for case, own in changes.items()]
    check_golden(sections(*found), __file__, f"program_pass_{name}")
    assert "changed by" in found[-2 if name == "recorded_steps" else -1][1]


def test_every_pass_has_cases() -> None:
    """Those of "accumulate" are in `test_golden_lower`."""
    assert ["accumulate", *CASES] == [p.name for p in PROGRAM_PASSES]
    assert min(map(len, CASES.values())) >= 3
