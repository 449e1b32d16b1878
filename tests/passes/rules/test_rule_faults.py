"""A rule that raises anything but its refusal is a bug of ours: it fails a test, and a user is told of it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from graphs import OneLayer, one_layer, reasons

import streambp_fx
from streambp_fx.passes.graph.facts import NotSeparable
from streambp_fx.passes.graph.op_arguments import arguments
from streambp_fx.passes.rules import RULES
from streambp_fx.passes.rules.asking import STRICT, RuleFault

aten = torch.ops.aten


def broken(ctx: Any, node: Any) -> Any:
    return {}["no such form"]


def too_short(ctx: Any, node: Any) -> Any:
    return ()


@pytest.mark.parametrize("rule", [broken, too_short])
def test_a_fault_fails_a_test(monkeypatch: pytest.MonkeyPatch, rule: Any) -> None:
    monkeypatch.setitem(RULES, aten.tanh.default, rule)
    monkeypatch.setenv(STRICT, "1")
    with pytest.raises(RuleFault, match=r"its rule for aten.tanh.default (raised KeyError|gave 0 dims)"):
        one_layer(lambda m, x: x.tanh())


@pytest.mark.parametrize("rule", [broken, too_short])
def test_a_user_is_told_of_a_fault_and_results_are_exact(monkeypatch: pytest.MonkeyPatch, rule: Any) -> None:
    monkeypatch.setitem(RULES, aten.tanh.default, rule)
    monkeypatch.setenv(STRICT, "0")
    torch.manual_seed(0)
    model = OneLayer(attend).double()
    ids = torch.randint(0, 11, (2, 33))
    expected = torch.autograd.grad(model(ids).sin().sum(), list(model.parameters()))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="streambp", options={"chunk": 8})
    with pytest.warns(streambp_fx.StreamBPWarning, match="a bug in streambp_fx: its rule for aten.tanh"):
        found = torch.autograd.grad(compiled(ids).sin().sum(), list(model.parameters()))
    for own, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-9, atol=1e-12)


def attend(model: OneLayer, x: torch.Tensor) -> torch.Tensor:
    q, k, v = model.heads(x)
    mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return mixed.transpose(1, 2).flatten(2).tanh()


def test_a_refusal_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(ctx: Any, node: Any) -> Any:
        raise NotSeparable("for a reason")

    monkeypatch.setitem(RULES, aten.tanh.default, refuses)
    facts = one_layer(lambda m, x: x.tanh())
    assert reasons(facts) == ["for a reason"] and not facts.faults


def test_an_operand_that_a_rule_does_not_look_at_may_not_have_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_alone(ctx: Any, node: Any) -> Any:
        return ctx.layout(arguments(node)["self"])

    monkeypatch.setitem(RULES, aten.mul.Tensor, first_alone)
    facts = one_layer(lambda m, x: m.query(x) * m.key(x))
    assert reasons(facts) == ["operand linear_1 carries the sequence"]


def test_rows_that_a_rule_loses_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_rows(ctx: Any, node: Any) -> Any:
        return (None,) * len(ctx.layout(node.args[0]))

    monkeypatch.setitem(RULES, aten.tanh.default, without_rows)
    (reason,) = reasons(one_layer(lambda m, x: x.tanh()))
    assert "entries, which are not its rows" in reason


def test_the_suite_is_strict() -> None:
    import os

    assert os.environ[STRICT] == "1"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one_layer(lambda m, x: x.tanh())
