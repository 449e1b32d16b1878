"""losses: one value a row or an element first, then the reduction as an op of its own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from golden import check_golden
from golden_graphs import CLASSES, Small, Stages, ids, source, stages
from torch import Tensor

aten = torch.ops.aten


def rewritten(function: Any, name: str) -> Stages:
    """Compare what the rewrites make of a loss of (hidden states, labels) with its golden file."""
    found = stages(Small(function), ids(), ids(), open_dims=(1, 1))
    text = found.change("autocast", "normalize")
    check_golden(f"{source(function)}\n\n{text}", __file__, f"losses_{name}")
    return found


def calls(found: Stages, target: Any) -> list[Any]:
    return list(found.facts.module.graph.find_nodes(op="call_function", target=target))


def mean_of_cross_entropies(m: Small, ids: Tensor, labels: Tensor) -> Tensor:
    logits = m.head(m.embed(ids))
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def test_a_cross_entropy_becomes_one_loss_a_row_and_the_summation_of_eager() -> None:
    found = rewritten(mean_of_cross_entropies, "cross_entropy")
    (rows,), (mean,) = (calls(found, t) for t in (aten.cross_entropy_loss.default, aten.nll_loss_nd.default))
    assert rows.args[3] == 0 and mean.args[3] == 1


def smoothed_sum(m: Small, ids: Tensor, labels: Tensor) -> Tensor:
    logits = m.head(m.embed(ids)).transpose(1, 2)
    return F.cross_entropy(logits, labels, ignore_index=3, label_smoothing=0.1, reduction="sum")


def test_classes_may_stand_in_the_second_dim() -> None:
    """What is ignored stays so: 3 is made the class that the summation ignores."""
    found = rewritten(smoothed_sum, "cross_entropy_of_classes_first")
    (rows,), (total,) = (calls(found, t) for t in (aten.cross_entropy_loss.default, aten.nll_loss_nd.default))
    assert rows.args[3:] == (0, 3, 0.1) and total.args[3] == 2
    assert calls(found, aten.eq.Scalar)[0].args[1] == 3


def weighted(m: Small, ids: Tensor, labels: Tensor) -> Tensor:
    logits = m.head(m.embed(ids)).flatten(0, 1)
    weights = torch.arange(11.0)
    one = F.cross_entropy(logits, labels.flatten(), weights)
    return one + F.cross_entropy(logits, labels.flatten(), reduction="none").amax()


def test_a_loss_with_weights_of_classes_and_one_by_rows_stay_as_they_are() -> None:
    found = rewritten(weighted, "cross_entropy_with_weights")
    assert len(calls(found, aten.cross_entropy_loss.default)) == 2
    assert "normalize changes nothing" in found.change("autocast", "normalize")
    assert not calls(found, aten.nll_loss_nd.default)


def squares(m: Small, ids: Tensor, labels: Tensor) -> Tensor:
    x = m.embed(ids)
    y = m.first(x)
    return F.mse_loss(x, y) + F.smooth_l1_loss(x, y, reduction="sum", beta=0.5)


def test_losses_by_elements() -> None:
    found = rewritten(squares, "by_elements")
    assert calls(found, aten.mse_loss.default)[0].kwargs["reduction"] == 0
    assert len(calls(found, aten.mean.default)) == len(calls(found, aten.sum.default)) == 1


def chosen(m: Small, ids: Tensor, labels: Tensor) -> Tensor:
    rows = m.head(m.embed(ids)).log_softmax(-1).flatten(0, 1)
    return -rows[torch.arange(rows.shape[0]), labels.flatten()].mean()


def test_one_entry_of_each_row_is_gathered() -> None:
    """An index from the end is one from the start, since `gather` knows no negative ones."""
    found = rewritten(chosen, "chosen_by_index")
    (gather,) = calls(found, aten.gather.default)
    assert gather.args[1] == 1 and not calls(found, aten.index.Tensor)
    assert calls(found, aten.add.Scalar)[0].args[1] == CLASSES


def chosen_otherwise(m: Small, ids: Tensor, labels: Tensor) -> Tensor:
    rows = m.head(m.embed(ids)).log_softmax(-1).flatten(0, 1)
    return -rows[torch.arange(rows.shape[0]).flip(0), labels.flatten()].mean()


def test_rows_in_another_order_are_not_gathered() -> None:
    found = rewritten(chosen_otherwise, "chosen_in_another_order")
    assert calls(found, aten.index.Tensor) and not calls(found, aten.gather.default)


def broadcast(m: Small, ids: Tensor, labels: Tensor) -> Tensor:
    x, mean = torch.broadcast_tensors(m.embed(ids), m.bias)
    return (x * mean).sum()


def test_tensors_that_are_broadcast_together_are_expanded_one_by_one() -> None:
    found = rewritten(broadcast, "broadcast_together")
    assert len(calls(found, aten.expand_as.default)) == 1 and not calls(found, aten.broadcast_tensors.default)
