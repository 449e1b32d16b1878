"""order: wide values as late as they can be. outputs: wide values next to a loss are not stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from golden import check_golden
from golden_graphs import Small, Stages, ids, sections, source, stages
from torch import Tensor

aten = torch.ops.aten


def run(function: Callable[..., Any], name: str, step: tuple[str, str], **options: Any) -> Stages:
    """Compare what one pass makes of a function with its golden file."""
    found = stages(Small(function), ids(), **options)
    text = sections(source(function), found.change(*step))
    check_golden(text, __file__, f"{step[1]}_{name}")
    return found


def ordered(function: Callable[..., Any], name: str) -> list[str]:
    """Names of the ops after the pass, in their order."""
    found = run(function, name, ("footprints", "widen_late"))
    return [n.name for n in found.facts.module.graph.nodes if n.op == "call_function"]


def teacher(m: Small, ids: Tensor) -> Tensor:
    x = m.embed(ids)
    with torch.no_grad():
        wanted = m.head(m.first(x)).softmax(-1)
    y = m.second(x).relu()
    return (m.head(y).log_softmax(-1) * wanted).sum()


def test_logits_of_a_teacher_are_made_when_the_student_is_ready() -> None:
    """What is alive meanwhile is their operand, which is narrower."""
    names = ordered(teacher, "teacher")
    assert names.index("linear_1") > names.index("relu") > names.index("linear")


def late_already(m: Small, ids: Tensor) -> Tensor:
    x = m.second(m.embed(ids)).relu()
    return m.head(x).log_softmax(-1).sum()


def test_what_is_late_stays() -> None:
    assert ordered(late_already, "late_already")[-2:] == ["log_softmax", "sum_1"]


def as_wide(m: Small, ids: Tensor) -> Tensor:
    x = m.embed(ids)
    gate = m.first(x).sigmoid()
    y = m.second(x).relu()
    return m.head(y * gate).sum()


def test_what_is_no_wider_than_its_operand_stays_where_gradients_pass() -> None:
    """Sums of gradients are taken in the order of the model."""
    names = ordered(as_wide, "no_wider")
    assert names.index("sigmoid") < names.index("relu")


def of_two(m: Small, ids: Tensor) -> Tensor:
    x = m.embed(ids)
    wide = torch.cat([x, x, x], -1)
    y = m.second(x).relu()
    return m.head(y).sum() + (wide.sum(-1) * y.sum(-1)).sum()


def test_a_wide_value_goes_to_its_first_reader() -> None:
    names = ordered(of_two, "first_reader")
    assert names[names.index("cat") + 1] == "sum_2" and names.index("cat") > names.index("relu")


# ---- outputs


def with_loss(m: Small, ids: Tensor) -> tuple[Tensor, Tensor]:
    logits = m.head(m.embed(ids)).float()
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten()), logits


def test_logits_next_to_a_loss_are_not_stored() -> None:
    found = run(with_loss, "logits", ("widen_late", "lazy_outputs"), logits="lazy")
    assert [n.target for n in found.facts.lazy.values()] == [aten.linear.default]
    assert found.facts.outputs[1] is None


def test_logits_that_shall_be_kept_are_stored() -> None:
    assert not run(with_loss, "logits_kept", ("widen_late", "lazy_outputs"), logits="keep").facts.lazy


def hidden_states(m: Small, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x = m.embed(ids)
    wide = m.head(x)
    x = m.first(wide[..., :8].relu())
    logits = m.head(x)
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten()), x, wide


def test_hidden_states_are_stored() -> None:
    """Neither what is as wide as its operand, nor what other products are made of."""
    assert not run(hidden_states, "hidden_states", ("widen_late", "lazy_outputs"), logits="lazy").facts.lazy


def without_loss(m: Small, ids: Tensor) -> Tensor:
    return m.head(m.embed(ids))


def test_logits_without_a_loss_are_the_result() -> None:
    assert not run(without_loss, "without_loss", ("widen_late", "lazy_outputs"), logits="lazy").facts.lazy
