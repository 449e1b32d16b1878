"""Sequence axes come from op rules: sizes that happen to be equal say nothing."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from graphs import WIDTH, OneLayer, facts_of, one_layer, reasons
from torch import Tensor

from streambp_fx.passes.graph.facts import ROW_AXIS, Axis, Kind, NotSeparable, Role, shape_of
from streambp_fx.passes.rules.shapes import regroup

aten = torch.ops.aten


def causal(model: OneLayer, x: Tensor) -> Tensor:
    q, k, v = model.heads(x)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    "length", [WIDTH, 11, 4, 2, 13], ids=["hidden size", "vocabulary", "head", "batch", "odd"]
)
def test_the_axis_is_found_whatever_size_the_sequence_shares(length: int) -> None:
    facts = one_layer(causal, length=length)
    embedding = next(n for n in facts.nodes if n.target is aten.embedding.default)
    attention = next(n for n in facts.mixings)
    assert facts.layouts[embedding] == (None, ROW_AXIS, None)
    assert facts.layouts[attention] == (None, None, ROW_AXIS, None)
    assert not facts.refusals
    assert [s.chunked for s in facts.segments] == [True] * 3


def test_scores_carry_the_sequence_twice() -> None:
    def body(model: OneLayer, x: Tensor) -> Tensor:
        q, k, v = model.heads(x)
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(2, 3)).masked_fill(future, float("-inf"))
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)

    facts = one_layer(body)
    softmax = next(n for n in facts.nodes if n.target is aten.softmax.int)
    assert [a and a.role for a in facts.layouts[softmax]] == [None, None, Role.ROW, Role.COLUMN]


def test_batch_and_sequence_merged_by_a_view() -> None:
    facts = one_layer(lambda m, x: torch.relu(x.view(-1, WIDTH) * 2).view(x.shape))
    relu = next(n for n in facts.nodes if n.target is aten.relu.default)
    assert facts.layouts[relu] == (Axis(outer=shape_of(relu)[0] / facts.sequence), None)
    assert not facts.refusals


@pytest.mark.parametrize(
    "body, words",
    [
        (lambda m, x: x.flip(1), "flip"),
        (lambda m, x: x.roll(1, 1), "roll"),
        (lambda m, x: x.softmax(1), "softmax over the sequence"),
        (lambda m, x: x.cumsum(1), "scan along the sequence"),
        (lambda m, x: x + x.mean(1, keepdim=True), "reduction over the sequence"),
        (lambda m, x: x.transpose(1, 2).reshape(x.shape), "view"),
        (lambda m, x: x.sort(1).values, "scan along the sequence"),
        (lambda m, x: torch.cat([x[:, 1:], x[:, :1]], 1), ""),
        (lambda m, x: x + F.pad(x[:, :-1], (0, 0, 1, 0)), ""),
        (lambda m, x: x @ (x.transpose(1, 2) @ x), "sums over the sequence"),
        (lambda m, x: F.layer_norm(x.transpose(1, 2), [x.shape[1]]).transpose(1, 2), "normalisation over"),
    ],
)  # fmt: skip
def test_ops_that_mix_rows_are_refused(body: object, words: str) -> None:
    facts = one_layer(body)  # type: ignore[arg-type]
    found = reasons(facts)
    assert found, "a segment that mixes rows in an unknown way must run whole"
    assert words in " ".join([*found, *facts.refusals.values()])


def test_square_and_whole_values_have_no_parameter() -> None:
    def body(model: OneLayer, x: Tensor) -> Tensor:
        position = torch.arange(x.shape[1])
        mask = position[None] <= position[:, None]
        q, k, v = model.heads(x)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)

    facts = one_layer(body)
    kinds = {n.target: facts.kinds[n] for n in facts.nodes if n.op == "call_function"}
    assert kinds[aten.arange.default] is Kind.WHOLE
    assert kinds[aten.le.Tensor] is Kind.SQUARE
    assert kinds[aten.scaled_dot_product_attention.default] is Kind.STREAM


def test_no_sequence_symbol_no_segments() -> None:
    facts = facts_of(lambda x: x * 2, torch.ones(3, 4), length_dims=())
    assert facts.sequence is None and facts.segments == []


# ---- views, exactly


S, B = (torch.fx.experimental.symbolic_shapes.sympy.Symbol(n, positive=True, integer=True) for n in "SB")


@pytest.mark.parametrize(
    "layout, before, after, expected",
    [
        ((None, ROW_AXIS, None), (2, S, 6), (2, S, 3, 2), (None, ROW_AXIS, None, None)),
        ((None, ROW_AXIS, None), (2, S, 6), (2 * S, 6), (Axis(outer=2), None)),
        ((None, ROW_AXIS, None), (B, S, 6), (B * S, 6), (Axis(outer=B), None)),
        ((Axis(outer=2), None), (2 * S, 6), (2, S, 6), (None, ROW_AXIS, None)),
        ((Axis(outer=2), None), (2 * S, 6), (2, 3 * S, 2), (None, Axis(inner=3), None)),
        ((None, Axis(inner=3), None), (2, 3 * S, 2), (2, S, 6), (None, ROW_AXIS, None)),
        ((None, ROW_AXIS, None, None), (1, S, 1, 6), (S, 6), (ROW_AXIS, None)),
        ((ROW_AXIS, None), (S, 6), (1, S, 1, 6), (None, ROW_AXIS, None, None)),
        ((None, None, ROW_AXIS, None), (2, 4, S, 8), (8, S, 8), (None, ROW_AXIS, None)),
        ((None, ROW_AXIS), (2, S), (2 * S,), (Axis(outer=2),)),
    ],
)  # fmt: skip
def test_regroup(layout: tuple, before: tuple, after: tuple, expected: tuple) -> None:
    sympify = torch.fx.experimental.symbolic_shapes.sympy.sympify
    assert regroup(layout, tuple(map(sympify, before)), tuple(map(sympify, after))) == expected


def test_regroup_refuses_a_split_of_the_sequence() -> None:
    sympify = torch.fx.experimental.symbolic_shapes.sympy.sympify
    with pytest.raises(NotSeparable):
        regroup((ROW_AXIS, None), (4 * S, sympify(6)), (sympify(2), 2 * S, sympify(6)))


def test_getitem_of_a_split_has_a_rule() -> None:
    facts = one_layer(lambda m, x: torch.cat(m.query(x).chunk(2, -1)[::-1], -1))
    taken = [n for n in facts.nodes if n.target is operator.getitem]
    assert taken and all(facts.layouts[n] == (None, ROW_AXIS, None) for n in taken)
