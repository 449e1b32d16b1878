"""The passes as a pipeline: their order, what is switched off, what a failure says, what is verified."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from graphs import OneLayer, one_layer
from torch import Tensor

from streambp_fx.passes import PASSES, PROGRAM_PASSES, STEP_PASSES
from streambp_fx.passes.graph.facts import Axis, Facts, Kind, PassError, Reach
from streambp_fx.passes.pipeline.runner import Pass, check_order, run_passes, without
from streambp_fx.passes.pipeline.verifier import UnsoundFacts, verify_facts


def causal(model: OneLayer, x: Tensor) -> Tensor:
    q, k, v = model.heads(x)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("passes", [PASSES, PROGRAM_PASSES, STEP_PASSES])
def test_passes_come_after_what_they_need(passes: tuple[Pass, ...]) -> None:
    check_order(passes)
    assert all(p.purpose and len(p.purpose) < 100 for p in passes)


def test_a_pass_that_comes_too_early_is_noticed() -> None:
    late = next(k for k, p in enumerate(PASSES) if p.name == "footprints")
    with pytest.raises(ValueError, match="pass 'footprints' needs kinds, layouts"):
        check_order([PASSES[late], *PASSES[:late]])
    with pytest.raises(ValueError, match="two passes have one name"):
        check_order([*PASSES, PASSES[0]])


@dataclasses.dataclass
class Number:
    value: int
    title: str = "a number"


ADD = Pass[Number, int]("add", "adds", lambda n, more: Number(n.value + more))
TWICE = Pass[Number, int]("twice", "doubles", lambda n, _: Number(2 * n.value), optional=True)
NEVER = Pass[Number, int]("never", "fails", lambda n, _: Number(n.value // 0), applies=lambda more: more < 0)


def test_passes_run_in_order_where_they_apply() -> None:
    assert run_passes((ADD, TWICE, NEVER), Number(1), 2).value == 6


def test_optional_passes_can_be_switched_off() -> None:
    with without("twice"):
        assert run_passes((ADD, TWICE), Number(1), 2).value == 3


def test_what_cannot_be_switched_off_is_said() -> None:
    message = r"pass 'add': it has to run. Passes that may be: .*reorder"
    with pytest.raises(ValueError, match=message), without("add"):
        pass
    with pytest.raises(ValueError, match="'reorderr': it does not exist"), without("reorderr"):
        pass
    environment = {**os.environ, "STREAMBP_WITHOUT": "reorder,rematerialise"}
    command = [sys.executable, "-c", "import streambp_fx.passes"]
    found = subprocess.run(command, env=environment, capture_output=True)
    assert found.returncode
    assert b"cannot switch off the pass 'rematerialise'" in found.stderr


def test_a_failure_names_its_pass() -> None:
    with pytest.raises(PassError, match="pass 'never' failed: ZeroDivisionError") as error:
        run_passes((ADD, NEVER), Number(1), -2)
    assert error.value.name == "never"


def test_what_a_pass_has_made_is_verified() -> None:
    def odd(one: Pass, number: Number) -> None:
        if number.value % 2 == 0:
            raise UnsoundFacts(f"{number.value} is even")

    assert run_passes((ADD, TWICE), Number(1), 2, odd, checked=False).value == 6
    with pytest.raises(PassError, match="pass 'twice' failed: UnsoundFacts: 6 is even"):
        run_passes((ADD, TWICE), Number(1), 2, odd, checked=True)


# ---- the verifier of facts


def _made_constant(facts: Facts) -> None:
    facts.kinds[next(n for n, k in facts.kinds.items() if k is Kind.STREAM)] = Kind.CONSTANT


def _forgotten(facts: Facts) -> None:
    del facts.kinds[next(n for n, k in facts.kinds.items() if k is Kind.STREAM)]


def _other_size(facts: Facts) -> None:
    node = next(n for n, own in facts.layouts.items() if own and any(own) and len(own) > 2)
    facts.layouts[node] = (Axis(), None, None)


def _too_few_dims(facts: Facts) -> None:
    node = next(n for n, own in facts.layouts.items() if own and any(own))
    facts.layouts[node] = (facts.layouts[node] or ())[:-1]


def _window_without_width(facts: Facts) -> None:
    next(iter(facts.mixings.values())).reach = Reach.WINDOW


def _in_two_segments(facts: Facts) -> None:
    facts.segments[-1].nodes.append(facts.segments[1].nodes[0])


def _not_given(facts: Facts) -> None:
    facts.segments[1].rows.clear()


def _made_later(facts: Facts) -> None:
    facts.segments[1].rows.append(facts.segments[-1].nodes[0])


def _output_of_another(facts: Facts) -> None:
    facts.segments[1].outputs.append(facts.segments[-1].nodes[0])


def _no_value(facts: Facts) -> None:
    del facts.segments[1].nodes[0].meta["val"]


BREAKS = {
    _made_constant: "is constant and has the shape",
    _forgotten: "has no kind",
    _other_size: "is said to be",
    _too_few_dims: "and its layout",
    _window_without_width: "a window of no width",
    _in_two_segments: "is in segments",
    _not_given: "which it is not given",
    _made_later: "which segment .* makes",
    _output_of_another: "is an output of segment 1 and not in it",
    _no_value: "has no fake value",
}


@pytest.mark.parametrize("wrong", BREAKS, ids=lambda f: f.__name__)
def test_wrong_facts_are_found(wrong: Callable[[Facts], None]) -> None:
    facts = one_layer(causal)
    verify_facts(PASSES[-1], facts)
    wrong(facts)
    with pytest.raises(UnsoundFacts, match=BREAKS[wrong]):
        verify_facts(PASSES[-1], facts)


@pytest.mark.parametrize("name", [p.name for p in (*PASSES, *PROGRAM_PASSES, *STEP_PASSES) if p.optional])
def test_without_an_optional_pass_gradients_are_the_same(name: str) -> None:
    """Switched off one by one, on a model with a loss."""
    import streambp_fx

    def gradients() -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = OneLayer(causal).double()
        compiled = torch.compile(
            model,
            backend="streambp",
            options={"chunk": 4, "loss_chunk": 4, "on_error": "raise", "check": "never"},
        )
        ids = torch.arange(26).view(2, 13) % 11
        F.cross_entropy(compiled(ids).flatten(0, 1), ids.flatten()).backward()
        assert sum(s.chunked for s in streambp_fx.schedule(model).segments) >= 2
        return [p.grad for p in model.parameters() if p.grad is not None]

    wanted = gradients()
    with without(name):
        found = gradients()
    for a, b in zip(wanted, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
