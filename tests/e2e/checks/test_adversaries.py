"""Adversaries: one small model for each way that is known to get a wrong gradient out of such a compiler.

They are tables of functions in `adversaries/`, a module a class. All of them:
`make test ARGS="-m 'slow or not slow' -k adversaries"`; some: `-k "attention and baddbmm"`.
"""

from __future__ import annotations

from typing import Any

import pytest
from adversaries import (
    attention,
    branch_objects,
    buffers,
    calls,
    complex_values,
    convolutions,
    corners,
    data_branches,
    experts,
    functions,
    gradients,
    hooks,
    in_place,
    loops,
    objectives,
    random_ops,
    recurrences,
    reductions,
    row_selections,
    scores,
    selections,
    situations,
    views,
)
from e2e_adversary import DOORS, Case, check

MODULES = (
    views,
    in_place,
    complex_values,
    scores,
    attention,
    random_ops,
    buffers,
    hooks,
    functions,
    gradients,
)
MODULES += (objectives, calls, situations, experts, convolutions, reductions, recurrences, selections, loops)
MODULES += (corners, data_branches, branch_objects, row_selections)
# One of each class runs by default.
OFTEN: dict[str, str] = {
    "corners: an adapter times zero": "transform",
    "corners: a power of the length": "transform",
    "corners: joined with no features": "compile",
    "corners: two chunks of a row": "transform",
    "selections: one row without a dim": "transform",
    "loops: logits beside the last state": "compile",
    "selections: an indexer": "compile",
    "experts: sorted and put back": "transform",
    "selected rows: a mask by expert and choice": "transform",
    "selected rows: added by a mask": "compile",
    "branches on data: counts as a list": "transform",
    "branches on data: experts that are hit": "compile",
    "objects behind branches: another name within the body": "transform",
    "objects behind branches: shares of nothing": "compile",
    "convolutions: before an attention": "compile",
    "recurrences: read by an attention": "compile",
    "loops: a step with no finite gradient for the first": "compile",
    "loops: what it has written by another name": "transform",
    "in place: masked fill through heads": "transform",
    "attention: rows that see nothing under dropout": "transform",
    "attention: keys and values of one sample": "compile",
    "scores: masked_fill of a huge number": "compile",
    "functions: gradient of a weight, signed": "compile",
    "random: noise of a custom function on a weight": "compile",
    "buffers: a log": "compile",
    "losses: cross entropy, smoothing and ignore_index 0, rows": "compile",
}


def _parameters() -> list[Any]:
    found = []
    for module in MODULES:
        for case in module.CASES.all.values():
            for door in (d for d in DOORS if d in case.want):
                marks = () if OFTEN.get(case.id) == door else pytest.mark.slow
                found.append(pytest.param(case, door, id=f"{case.id} [{door}]", marks=marks))
    return found


@pytest.mark.parametrize(("case", "door"), _parameters())
def test_adversaries(case: Case, door: str) -> None:
    check(case, door)


def test_all_that_runs_often_is_there() -> None:
    known = {case.id for module in MODULES for case in module.CASES.all.values()}
    assert OFTEN.keys() <= known
