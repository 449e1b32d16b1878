"""Every op rule against what the op does, on PyTorch's own samples and on some by hand (`one_op`)."""

from __future__ import annotations

import contextlib
import itertools
import operator
import random
from collections.abc import Iterator
from typing import Any

import opdb_hand  # noqa: F401  (registers its samples)
import pytest
import torch
from one_op import Case, Unsuited, build, cases, check
from opdb_cases import Call, calls_by_hand, calls_of_entry, database, entries_for

from streambp_fx.checking.same_random_numbers import Drawing, _Seeded
from streambp_fx.passes.graph.purity import is_random
from streambp_fx.passes.graph.refusals import MutationError
from streambp_fx.passes.rules import RULES
from streambp_fx.passes.rules.pointwise import POINTWISE, pointwise_ops, tagged_ops
from streambp_fx.passes.rules.random_numbers import DRAWS, PROBABILITIES
from streambp_fx.passes.rules.row_selections import positions_where

aten = torch.ops.aten
# It stands in for an op while a proof is made, and never runs (`adversaries/row_selections.py`).
STAND_IN = positions_where
OPS = [op for op in RULES if not isinstance(op, str) and op not in (operator.getitem, STAND_IN)]
WANTED = frozenset(OPS)
# Ops that make nothing of rows: what they give has none, or it is computed once.
WITHOUT_ROWS = {
    aten.sum.default, aten.mean.default, aten.arange.default, aten.arange.start, aten.arange.start_step,
    aten.zeros.default, aten.ones.default, aten.full.default, aten.new_ones.default, aten.new_zeros.default,
    aten.new_full.default, aten.scalar_tensor.default, aten.empty.memory_format, aten.eye.default,
}  # fmt: skip
# They have no derivative, and are tried in models (`adversaries/experts.py`, `test_random_rows.py`).
WITHOUT_DERIVATIVE = frozenset(
    {aten.one_hot.default, aten.histc.default, aten.bernoulli.p, aten.normal_functional.default}
)
# Made of other ops before a graph is captured.
COMPOSITE = frozenset({aten.clip.default, aten.clip.Tensor})
# Of each op in the default run: tried at most, and accepted at most.
TRIED, ACCEPTED = 12, 2


def calls_of(op: Any, samples: int | None) -> list[Call]:
    """Calls of an op: those by hand, and those of entries of the database that are named like it."""
    found = list(calls_by_hand(WANTED).get(op, []))
    for entry in entries_for(op):
        calls, _ = calls_of_entry(entry, WANTED, samples)
        found += [call for call in calls if call.target is op]
    return found


def outcome(case: Case, traced: bool = False) -> str:
    """What became of a case; an assertion fails if a rule claims what is not so."""
    try:
        one = build(case)
        by_rows = case.call.target in (*DRAWS, *PROBABILITIES)
        if is_random(one.node) and not by_rows:
            return "random"
        if not one.accepted:
            return "refused"
        with _Seeded(Drawing()) if by_rows else contextlib.nullcontext():  # the same number everywhere
            return "checked" if check(one, traced and not by_rows) else "nothing to check"
    except (Unsuited, MutationError):
        return "unsuited"


def spread(calls: list[Call], seed: int) -> Iterator[Case]:
    """Cases of all calls in a random order, one of each call before there is a second of any."""
    draw = random.Random(seed)
    lists = [list(cases(call)) for call in calls]
    for each in lists:
        draw.shuffle(each)
    draw.shuffle(lists)
    for layer in itertools.zip_longest(*lists):
        yield from (case for case in layer if case is not None)


@pytest.mark.parametrize("op", OPS, ids=str)
def test_a_rule_claims_what_is_so(op: Any) -> None:
    calls = calls_of(op, samples=3)
    assert calls or op in COMPOSITE, f"{op} has a rule and no sample: add one to opdb_hand.py"
    found: list[str] = []
    for k, case in enumerate(spread(calls, seed=len(str(op)))):
        found.append(outcome(case, traced=OPS.index(op) % 10 == 0 and "checked" not in found))
        if found.count("checked") == ACCEPTED or (k >= TRIED and "checked" in found):
            break
    if set(found) <= {"unsuited", "refused"} and op in (*tagged_ops(), *WITHOUT_DERIVATIVE):
        pytest.skip("PyTorch has no derivative for it, or captures it as other ops")
    assert op in WITHOUT_ROWS or {"checked", "random"} & set(found), f"the rule accepts no sample: {found}"
    assert op not in WITHOUT_ROWS or "checked" not in found


def test_lists_of_ops_hold_what_this_torch_has() -> None:
    """A name that is misspelt would be dropped without a word."""
    assert len(set(POINTWISE)) == len(POINTWISE)
    assert {f"aten.{name}" for name in POINTWISE} <= set(map(str, pointwise_ops()))


def test_what_pytorch_tags_as_elementwise_has_a_rule() -> None:
    assert {aten.fmax.default, aten.sgn.default, aten.tan.default} <= set(tagged_ops()) <= set(OPS)
    assert aten.equal.default not in OPS  # one bool of two tensors, though it is tagged


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({op._schema.name for op in OPS}))
def test_a_rule_claims_what_is_so_in_every_case(name: str) -> None:
    for op in (op for op in OPS if op._schema.name == name):
        for k, case in enumerate(itertools.islice(spread(calls_of(op, samples=None), seed=1), 300)):
            outcome(case, traced=k % 20 == 0)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(16))
def test_no_entry_of_the_database_contradicts_a_rule(part: int) -> None:
    """Also ops that other functions are made of: samples of all entries, whatever their names."""
    for name in sorted(database())[part::16]:
        for k in range(len(database()[name])):
            calls, _ = calls_of_entry((name, k), WANTED, 4)
            for case in itertools.islice(spread(calls, seed=2), 12):
                outcome(case)
