"""normalize: what goes, what stays, and what is written in another way."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from golden import check_golden
from golden_graphs import Small, Stages, ids, source, stages
from torch import Tensor

aten = torch.ops.aten


def normalised(function: Any, name: str) -> Stages:
    """Compare what the pass makes of a function with its golden file."""
    found = stages(Small(function), ids())
    text = found.refused or found.change("autocast", "normalize")
    check_golden(f"{source(function)}\n\n{text}", __file__, f"normalize_{name}")
    return found


def targets(found: Stages) -> list[Any]:
    return [n.target for n in found.facts.module.graph.nodes if n.op == "call_function"]


def nothing_done(m: Small, ids: Tensor) -> Tensor:
    x = F.dropout(m.embed(ids), 0.0)
    x = x.to(torch.float32).contiguous()
    x = x[:, 0:].view(x.shape)
    x.exp().sum()
    return m.head(torch.cat([x.new_empty(0), x], 1))


def test_ops_that_do_nothing_go() -> None:
    """And so does what nobody reads."""
    found = normalised(nothing_done, "ops_that_do_nothing")
    assert targets(found) == [aten.embedding.default, aten.linear.default]


def something_done(m: Small, ids: Tensor) -> Tensor:
    x = F.dropout(m.embed(ids), 0.1)
    x = x.to(torch.float64).to(torch.float32)
    x = x.transpose(0, 1).contiguous().transpose(0, 1)
    x = x[:, 1:].flatten(0, 1)
    return m.head(x)


def test_ops_that_do_something_stay() -> None:
    found = normalised(something_done, "ops_that_do_something")
    kept = {aten.dropout.default, aten.to.dtype, aten.contiguous.default, aten.slice.Tensor}
    assert kept | {aten.flatten.using_ints} <= set(targets(found))
    assert "normalize changes nothing" in found.change("autocast", "normalize")


def heads_repeated(m: Small, ids: Tensor) -> Tensor:
    q = m.heads(m.embed(ids), 4)
    k = m.first(m.embed(ids)).view(2, -1, 4, 2).transpose(1, 2)[:, :2]
    v = k[:, :, None].expand(2, 2, 2, k.shape[2], 2).reshape(2, 4, k.shape[2], 2)
    k = k.repeat_interleave(2, 1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_repeated_heads_are_handed_to_the_kernel_as_they_are() -> None:
    found = normalised(heads_repeated, "heads_repeated")
    (attention,) = found.facts.mixings
    assert attention.kwargs["enable_gqa"] and int(attention.args[1].meta["val"].shape[1]) == 2
    assert aten.repeat_interleave.self_int not in targets(found)


def heads_repeated_beside_a_change(m: Small, ids: Tensor) -> Tensor:
    x = m.first(m.embed(ids))
    x.mul_(0.5)
    q, k = m.heads(x, 4), m.heads(x, 4)[:, :2]
    k = k[:, :, None].expand(2, 2, 2, k.shape[2], 2).reshape(2, 4, k.shape[2], 2)
    return F.scaled_dot_product_attention(q, k, k, is_causal=True)


def test_repeated_heads_are_seen_in_functional_form() -> None:
    """Functionalization writes a `reshape` that copies as a clone and an unsafe view."""
    found = normalised(heads_repeated_beside_a_change, "heads_repeated_beside_a_change")
    (attention,) = found.facts.mixings
    assert attention.kwargs["enable_gqa"] and int(attention.args[1].meta["val"].shape[1]) == 2
    assert not {aten._unsafe_view.default, aten.clone.default} & set(targets(found))


def a_copy_returned_beside_a_change(m: Small, ids: Tensor) -> Tensor:
    x = m.first(m.embed(ids))
    x.mul_(0.5)
    return x.transpose(0, 1).reshape(-1, x.shape[2]), m.head(x)


def test_a_copy_that_is_returned_stays_a_copy() -> None:
    found = normalised(a_copy_returned_beside_a_change, "a_copy_returned_beside_a_change")
    assert aten._unsafe_view.default in targets(found)


def heads_repeated_differently(m: Small, ids: Tensor) -> Tensor:
    q = m.heads(m.embed(ids), 4)
    k = m.heads(m.embed(ids), 4)
    v = torch.cat([q[:, :2], q[:, :2]], 1)
    k = k[:, :2].repeat_interleave(2, 1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_heads_that_are_not_repeated_alike_stay() -> None:
    """The heads of the values come as 0, 1, 0, 1, those of the keys as 0, 0, 1, 1."""
    found = normalised(heads_repeated_differently, "heads_repeated_differently")
    (attention,) = found.facts.mixings
    assert "enable_gqa" not in attention.kwargs and aten.repeat_interleave.self_int in targets(found)


def rows_taken_late(m: Small, ids: Tensor) -> Tensor:
    logits = m.head(m.embed(ids)).double() * 2
    return logits[:, :-1].exp()


def test_rows_are_taken_where_they_are_narrow() -> None:
    found = normalised(rows_taken_late, "rows_taken_late")
    assert targets(found)[:3] == [aten.embedding.default, aten.slice.Tensor, aten.linear.default]


def rows_read_elsewhere(m: Small, ids: Tensor) -> Tensor:
    logits = m.head(m.embed(ids))
    return logits[:, :-1].exp(), logits.sum()


def test_rows_of_a_value_that_is_read_whole_are_taken_where_the_model_does() -> None:
    found = normalised(rows_read_elsewhere, "rows_read_elsewhere")
    assert targets(found)[:3] == [aten.embedding.default, aten.linear.default, aten.slice.Tensor]


def without_gradients(m: Small, ids: Tensor) -> Tensor:
    x = m.embed(ids)
    with torch.no_grad():
        scale = x.abs().amax(-1, keepdim=True)
        scale = scale + 1
    return m.head(x / scale)


def test_what_is_made_without_gradients_is_detached() -> None:
    found = normalised(without_gradients, "made_without_gradients")
    graph = found.facts.module.graph
    (detached,) = graph.find_nodes(op="call_function", target=aten.detach.default)
    assert not {n for n in graph.nodes if n.target is torch._C._set_grad_enabled}
    assert detached not in found.facts.needs_grad


def view_returned(m: Small, ids: Tensor) -> Tensor:
    x = m.embed(ids)
    return m.head(x), x.view(x.shape)


def test_a_view_that_is_returned_beside_what_is_made_of_its_value_is_refused() -> None:
    """Its gradient would become that of all that is made of the value."""
    found = normalised(view_returned, "view_returned")
    assert found.refused.startswith("refused by normalize: a view is returned of a value")
