"""Cuts lie where little is alive; masks decide how far rows reach; identical layers share programs."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from graphs import OneLayer, facts_of, one_layer
from torch import Tensor, nn

from streambp_fx.passes.graph.facts import Reach, Segment, shape_of
from streambp_fx.passes.s4_trace.carried_state import find_states

aten = torch.ops.aten


def attend(model: OneLayer, x: Tensor, **options: object) -> Tensor:
    q, k, v = model.heads(x)
    return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).flatten(2)  # type: ignore[arg-type]


def positions(x: Tensor) -> tuple[Tensor, Tensor]:
    position = torch.arange(x.shape[1])
    return position[:, None], position[None, :]


def masked(predicate):
    return lambda m, x: attend(m, x, attn_mask=predicate(*positions(x)))


@pytest.mark.parametrize(
    "body, reach, window",
    [
        (lambda m, x: attend(m, x, is_causal=True), Reach.CAUSAL, None),
        (lambda m, x: attend(m, x), Reach.FULL, None),
        (masked(lambda i, j: j <= i), Reach.CAUSAL, None),
        (masked(lambda i, j: (j <= i) & (j > i - 5)), Reach.WINDOW, 5),
        (masked(lambda i, j: (j <= i) & (i // 4 == j // 4)), Reach.CAUSAL, None),
        (masked(lambda i, j: j <= i + 1), Reach.FULL, None),
        (masked(lambda i, j: j >= i), Reach.FULL, None),
        (masked(lambda i, j: (j <= i) | (j < 3)), Reach.FULL, None),
    ],
    ids=["causal", "none", "mask", "window", "blocks", "one ahead", "backwards", "prefix"],
)
def test_reach(body: object, reach: Reach, window: int | None) -> None:
    facts = one_layer(body)  # type: ignore[arg-type]
    layer = facts.segments[1]
    assert layer.chunked and layer.mixings
    found = layer.reach if not (layer.reach is Reach.WINDOW and layer.window is None) else Reach.CAUSAL
    if window is None and reach is Reach.CAUSAL:
        assert found in (Reach.CAUSAL, Reach.WINDOW)  # a block of 4 is a window as well
    else:
        assert (found, layer.window) == (reach, window)


@pytest.mark.parametrize(
    "hidden, reach",
    [
        (lambda i, j: j > i, Reach.CAUSAL),
        (lambda i, j: ~(j <= i), Reach.CAUSAL),
        (lambda i, j: (j > i) | (j <= i - 5), Reach.WINDOW),
        (lambda i, j: j <= i, Reach.FULL),
        (lambda i, j: j > i + 1, Reach.FULL),
        (lambda i, j: (j > i) & (j > 3), Reach.FULL),
    ],
    ids=["later", "not earlier", "later or too early", "earlier", "all but the next", "later but for three"],
)
def test_scores_that_are_filled_with_minus_infinity(hidden: object, reach: Reach) -> None:
    """The mask of `masked_fill` is true where nothing may be read."""

    def body(model: OneLayer, x: Tensor) -> Tensor:
        q, k, v = model.heads(x)
        scores = (q @ k.transpose(2, 3)).masked_fill(hidden(*positions(x)), float("-inf"))  # type: ignore[operator]
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)

    layer = one_layer(body).segments[1]
    assert layer.chunked and layer.reach is reach


def in_one_segment(body: Callable[[OneLayer, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> Segment:
    """The segment of a layer with several attentions, which no cut is cheap enough to part."""
    monkeypatch.setattr(importlib.import_module("streambp_fx.passes.s3_cut.segment"), "EXPENSIVE", -1.0)
    found = [s for s in one_layer(body).segments if len(s.mixings) > 1]
    assert len(found) == 1
    return found[0]


def test_states_made_of_states_are_chained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of the second attention are made of what the first one gives."""

    def body(model: OneLayer, x: Tensor) -> Tensor:
        first = attend(model, x, is_causal=True)
        return attend(model, x + model.out(first), is_causal=True)

    layer = in_one_segment(body, monkeypatch)
    assert layer.chained and layer.chunked


def test_states_of_two_attentions_side_by_side_are_not_chained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of both are made of the rows that go in; only the queries of the second one are not."""

    def body(model: OneLayer, x: Tensor) -> Tensor:
        first = attend(model, x, is_causal=True)
        _, k, v = model.heads(x)
        asked = model.query(x + model.out(first)).view(*x.shape[:2], 2, -1).transpose(1, 2)
        return F.scaled_dot_product_attention(asked, k, v, is_causal=True).transpose(1, 2).flatten(2)

    layer = in_one_segment(body, monkeypatch)
    assert layer.chunked and not layer.chained


def side_by_side(**options: object) -> list[Segment]:
    """The segments of a layer with two attentions, neither of which reads what the other one makes."""

    def body(model: OneLayer, x: Tensor) -> Tensor:
        return attend(model, x, **options) - attend(model, x.roll(1, -1), **options)

    return [s for s in one_layer(body).segments if s.mixings]


def test_levels_that_do_not_read_each_other_share_a_segment() -> None:
    """A cut between them would spare no recompute, and store a second value of each row."""
    (layer,) = side_by_side(is_causal=True)
    assert layer.chunked and not layer.chained and len(layer.mixings) == 2 and len(layer.rows) == 1


def test_levels_side_by_side_that_read_all_rows_share_a_segment() -> None:
    (layer,) = side_by_side()
    assert layer.chunked and layer.reach is Reach.FULL and not layer.chained


def test_a_level_that_reads_further_has_a_segment_of_its_own() -> None:
    """It would make the other one read as far."""

    def body(model: OneLayer, x: Tensor) -> Tensor:
        i, j = positions(x)
        near = attend(model, x, attn_mask=(j <= i) & (j > i - 5))
        return near - attend(model, x.roll(1, -1), is_causal=True)

    layers = [s for s in one_layer(body).segments if s.mixings]
    assert [s.window for s in layers] == [5, None] and all(s.chunked for s in layers)


def test_a_level_whose_queries_another_one_makes_has_a_segment_of_its_own() -> None:
    """Layers that share keys and values are layers nevertheless."""

    def body(model: OneLayer, x: Tensor) -> Tensor:
        _, k, v = model.heads(x)
        for _ in range(2):
            q = model.query(x).view(*x.shape[:2], 2, -1).transpose(1, 2)
            x = x + model.out(
                F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            )
        return x

    assert [len(s.mixings) for s in one_layer(body).segments if s.mixings] == [1, 1]


def test_chained_states_of_which_one_sees_later_rows_are_not_chunked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The states of a chunk would need those of all other chunks, each of which needs those of this one."""

    def body(model: OneLayer, x: Tensor) -> Tensor:
        first = attend(model, x)
        return attend(model, x + model.out(first), is_causal=True)

    layer = in_one_segment(body, monkeypatch)
    assert not layer.chunked and "levels of mixing that cannot be cut apart" in (layer.reason or "")


class Stack(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.layers = nn.ModuleList(
            [OneLayer(lambda m, x: attend(m, x, is_causal=True)) for _ in range(layers)]
        )

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer.out(layer.body(layer, x))
        return F.cross_entropy(self.head(x).view(-1, 11), labels.view(-1))


def stack(layers: int):
    ids = torch.randint(0, 11, (2, 13))
    return facts_of(Stack(layers), ids, ids.clone(), length_dims=(1, 1))


def test_one_segment_a_layer_and_identical_ones_share_a_signature() -> None:
    facts = stack(5)
    kinds = [s.kind for s in facts.segments]
    assert kinds == ["unchunked", *["layer"] * 5, "rows"]
    assert len({s.signature for s in facts.segments}) == 3
    assert all(len(s.rows) == 1 for s in facts.segments[1:])


class Scaled(Stack):
    """Each layer scales its rows by what it makes of data and its own weights, as DoRA does."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            before, after = (part(torch.eye(8)).norm(dim=1) for part in (layer.query, layer.out))
            x = x + layer.out(layer.body(layer, x * before)) * after
        return F.cross_entropy(self.head(x).view(-1, 11), labels.view(-1))


def test_an_input_for_each_layer_is_stored_once() -> None:
    """It is far wider than what else is alive between two layers, at each of which it would be counted."""

    class Fed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.wide = (
                OneLayer(lambda m, x: attend(m, x, is_causal=True)),
                nn.Embedding(11, 3 * 80),
            )
            self.narrow = nn.Linear(80, 8)

        def forward(self, ids: Tensor) -> Tensor:
            own, x = self.wide(ids).unflatten(-1, (3, 80)), self.layer.embed(ids)
            for k in range(3):
                x = x + self.layer.out(attend(self.layer, x, is_causal=True))
                x = x + self.narrow(own[:, :, k])
            return self.layer.head(x)

    facts = facts_of(Fed(), torch.randint(0, 11, (2, 13)))
    layers = [s for s in facts.segments if s.mixings]
    assert [len(s.mixings) for s in layers] == [1, 1, 1]


def test_what_a_layer_makes_of_its_weights_does_not_begin_a_model() -> None:
    """Between layers lies the residual stream alone, as if there were no such value."""
    ids = torch.randint(0, 11, (2, 13))
    facts = facts_of(Scaled(3), ids, ids.clone(), length_dims=(1, 1))
    layers = [s for s in facts.segments if s.kind == "layer"]
    assert facts.context and len(layers) == 3 and all(s.chunked for s in facts.segments)
    assert all(len(s.rows) == len(s.outputs) == 1 for s in layers)


def test_frozen_parameters_make_another_signature() -> None:
    model = Stack(3)
    model.layers[1].query.weight.requires_grad_(False)
    ids = torch.randint(0, 11, (2, 13))
    facts = facts_of(model, ids, ids.clone(), length_dims=(1, 1))
    first, second, third = (s.signature for s in facts.segments[1:4])
    assert first == third != second


def test_the_loss_is_in_the_epilogue_and_the_logits_are_not_stored() -> None:
    facts = stack(2)
    """The head ends with one number a row; what follows is the reduction."""
    (stored,) = facts.segments[-1].outputs
    assert [s != 1 for s in shape_of(stored)].count(True) == 1
    assert aten.cross_entropy_loss.default in {n.target for n in facts.segments[-1].nodes}
    assert {n.target for n in stored.users} == {aten.nll_loss_nd.default}


def test_the_state_is_cut_before_heads_are_repeated() -> None:
    def body(model: OneLayer, x: Tensor) -> Tensor:
        q, k, v = model.heads(x, 4)
        k, v = (t[:, :2].repeat_interleave(2, 1) for t in (k, v))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        scores = (q @ k.transpose(2, 3)).masked_fill(~mask, float("-inf"))
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)

    facts = one_layer(body)
    states = find_states(facts, facts.segments[1])
    assert [int(s.node.meta["val"].shape[1]) for s in states] == [2, 2]


def test_grouped_heads_are_handed_to_the_kernel() -> None:
    def body(model: OneLayer, x: Tensor) -> Tensor:
        q, k, v = model.heads(x, 4)
        b, _, t, d = q.shape
        k, v = (z[:, :2, None].expand(b, 2, 2, t, d).reshape(b, 4, t, d) for z in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    facts = one_layer(body)
    (node,) = facts.mixings
    assert node.kwargs["enable_gqa"] and int(node.args[1].meta["val"].shape[1]) == 2


def test_rows_sliced_before_the_loss_make_a_sequence_of_their_own() -> None:
    class Shifted(Stack):
        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            x = self.embed(ids)
            for layer in self.layers:
                x = x + layer.out(layer.body(layer, x))
            logits = self.head(x).float()[:, :-1]
            return F.cross_entropy(logits.reshape(-1, 11), labels[:, 1:].reshape(-1))

    ids = torch.randint(0, 11, (2, 13))
    facts = facts_of(Shifted(2), ids, ids.clone(), length_dims=(1, 1))
    assert all(s.chunked for s in facts.segments)
    assert facts.segments[-1].removed == 1 and facts.segments[1].removed == 0


def centred(x: Tensor) -> Tensor:
    """An op that runs unchunked: a sum over all rows."""
    return x - x.mean(1, keepdim=True)


@pytest.mark.parametrize("layers", [1, 2, 6, 11])
def test_parts_that_run_unchunked_become_one_where_that_holds_less(layers: int) -> None:
    """With many layers what lies within them is more than what one layer makes; NOTE [parts side by side]."""

    def body(m: OneLayer, x: Tensor) -> Tensor:
        for _ in range(layers):
            x = x + centred(m.query(centred(m.value(centred(m.key(x))))))
        return x

    means = [sum(n.target is aten.mean.dim for n in s.nodes) for s in one_layer(body).segments]
    together = [count for count in means if count]
    assert sum(together) == 3 * layers
    if layers == 1:
        assert together == [1, 1, 1]
    if layers >= 6:  # a layer each, as with checkpointing; the last one stores nothing more either way
        assert together[: layers - 1] == [3] * (layers - 1)


def test_parts_that_make_next_to_nothing_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streambp_fx.passes.s3_cut.joined_parts._made", lambda facts, nodes: 0)
    segments = one_layer(lambda m, x: centred(m.query(centred(x)))).segments
    assert [sum(n.target is aten.mean.dim for n in s.nodes) for s in segments if s.refused] == [2]


def test_a_value_that_is_returned_still_ends_its_segment() -> None:
    """Nobody has the gradient of a value inside of a segment; its cut stays."""

    class Shown(OneLayer):
        def forward(self, ids: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
            x, found = self.embed(ids), []
            for _ in range(6):
                found.append(centred(self.key(x)))
                x = x + centred(self.query(centred(self.value(found[-1]))))
            return self.head(x), *found

    facts = facts_of(Shown(lambda m, x: x), torch.randint(0, 11, (2, 13)))
    means = [sum(n.target is aten.mean.dim for n in s.nodes) for s in facts.segments]
    together = [count for count in means if count]
    assert together[:10] == [1, 2] * 5


@pytest.mark.parametrize("layers, joined", [(1, False), (12, True)])
def test_a_part_in_chunks_joins_what_reads_its_wide_values(layers: int, joined: bool) -> None:
    def body(m: OneLayer, x: Tensor) -> Tensor:
        for _ in range(layers):
            wide = torch.cat([m.query(x), m.key(x), m.value(x)], -1)[:, None]
            wide = F.scaled_dot_product_attention(wide, wide, wide, is_causal=True)[:, 0]
            x = x + m.out(centred(wide).unflatten(-1, (3, -1)).sum(2))
        return x

    mixing = [s for s in one_layer(body).segments if s.mixings]
    assert [s.chunked for s in mixing] == [not joined] * layers
