"""Faults of the compiler stay in the compiler, and the log says what the passes did."""

from __future__ import annotations

import copy
import importlib
import logging
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from e2e_check import GRAPH_PASSES, assert_close_grads, grads
from e2e_models import CHUNK, LOSS_CHUNK, build, plain, sample

import streambp_fx
from streambp_fx import CompileError, StreamBPWarning
from streambp_fx.passes import rules
from streambp_fx.passes.s4_trace import evaluation
from streambp_fx.passes.s5_lower.lower import lower

OPTIONS = {"chunk": CHUNK, "loss_chunk": LOSS_CHUNK}
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def broken_emit(*args: Any) -> Any:
    raise ZeroDivisionError("a fault in a chunk program")


def break_analysis(monkeypatch: pytest.MonkeyPatch) -> str:
    def order(*args: Any) -> Any:
        raise ZeroDivisionError("a fault in a pass")

    monkeypatch.setattr(streambp_fx.passes, "widen_late", order)
    return "pass 'widen_late' failed"


def break_chunk(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(evaluation.EMIT, aten.silu.default, broken_emit)
    return r"pass 'chunk' failed at silu \(aten.silu.default\)"


def break_lowering(monkeypatch: pytest.MonkeyPatch) -> str:
    def broken(*args: Any) -> Any:
        if any("flash" in str(n.target) and "backward" in str(n.target) for n in args[0].graph.nodes):
            raise ZeroDivisionError("a fault in lower, in the program of the backward")
        return lower(*args)

    monkeypatch.setattr(importlib.import_module("streambp_fx.passes.s5_lower.programs"), "lower", broken)
    return "pass 'lower' failed"


FAULTS = {"analysis": break_analysis, "chunk": break_chunk, "backward program": break_lowering}


@pytest.mark.parametrize("door", sample(["compile", "transform"], "compile"))
@pytest.mark.parametrize("fault", sample(FAULTS, "chunk"))
def test_a_fault_is_a_compile_error(fault: str, door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raised in the forward, with the pass, the op, the model's line and a way out; the model is unharmed."""
    words = FAULTS[fault](monkeypatch)
    model = build("llama")
    before = copy.deepcopy(model.state_dict())
    if door == "compile":
        call = torch.compile(model, backend="streambp", options={**OPTIONS, "on_error": "raise"})
    else:
        call = streambp_fx.transform(model, **OPTIONS, on_error="raise")
    with pytest.raises(Exception, match=f"(?s){words}.*ZeroDivisionError.*on_error") as caught:
        call(**plain(2, 37))
    inner = getattr(caught.value, "inner_exception", caught.value)
    assert isinstance(inner, CompileError)
    if fault == "chunk":
        assert "silu(input" in str(inner), "the line of the model's source"
    monkeypatch.undo()
    torch._dynamo.reset()
    streambp_fx.restore(model)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    model(**plain(2, 37)).loss.backward()


@pytest.mark.parametrize("fault", sample(FAULTS, "analysis"))
def test_a_fault_is_a_warning(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning, and the step runs unstreamed, exactly."""
    words = FAULTS[fault](monkeypatch)
    eager = build("llama")
    model = copy.deepcopy(eager)
    call = torch.compile(model, backend="streambp", options=OPTIONS)
    for length in (37, 40):
        eager.zero_grad()
        eager(**plain(2, length)).loss.backward()
        model.zero_grad()
        if length == 37:
            with pytest.warns(StreamBPWarning, match=f"(?s)unstreamed.*{words}"):
                loss = call(**plain(2, length)).loss
        else:
            loss = call(**plain(2, length)).loss
        loss.backward()
        assert_close_grads(grads(model), grads(eager), 1e-12)


def test_a_rule_that_fails_makes_a_region_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that does not understand a form refuses, and the region runs unchunked."""

    def refuse(*args: Any) -> Any:
        raise IndexError("a form the rule never met")

    monkeypatch.setitem(rules.RULES, aten.silu.default, refuse)
    monkeypatch.delenv("STREAMBP_STRICT")  # a user's process has it not
    eager = build("llama")
    model = copy.deepcopy(eager)
    with pytest.warns(StreamBPWarning, match="aten.silu.default"):
        torch.compile(model, backend="streambp", options=OPTIONS)(**plain(2, 37)).loss.backward()
    eager(**plain(2, 37)).loss.backward()
    assert_close_grads(grads(model), grads(eager), 1e-9)


@pytest.mark.slow
def test_one_line_a_pass(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "streambp_fx.passes"):
        torch.compile(build("llama"), backend="streambp", options=OPTIONS)(**plain(2, 37))
    lines = [r.getMessage() for r in caplog.records if r.name == "streambp_fx.passes"]
    assert [line.split()[0] for line in lines if line.split()[0] in GRAPH_PASSES] == GRAPH_PASSES
    assert "4 segments, 3 distinct" in lines[GRAPH_PASSES.index("signatures")]
    assert not any(r.levelno < logging.INFO for r in caplog.records if r.name == "streambp_fx.passes")


@pytest.mark.slow
def test_programs_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "streambp_fx.passes"):
        torch.compile(build("llama"), backend="streambp", options=OPTIONS)(**plain(2, 37))
    text = caplog.text
    assert "after capture:" in text and "after segment:" in text
    assert "--- segment 1 (layer)" in text and "reads CAUSAL" in text and "[-, row, -]" in text


SCRIPT = """
import torch
def f(x, w):
    q, k, v = (x @ w).unsqueeze(1).chunk(3, -1)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum()
torch.compile(f, backend="streambp", options={"chunk": 4})(torch.ones(2, 11, 8),
    torch.ones(8, 24, requires_grad=True)).backward()
"""


@pytest.mark.slow
def test_torch_logs_and_torch_trace(tmp_path: Any) -> None:
    """The way people turn PyTorch's logs on: TORCH_LOGS for lines, TORCH_TRACE for what tlparse shows."""
    env = {**os.environ, "TORCH_LOGS": "streambp_fx.passes", "TORCH_TRACE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert "segment " in done.stderr and "1 read along the sequence" in done.stderr, done.stderr
    trace = "".join(p.read_text() for p in tmp_path.iterdir())
    assert "streambp_after_segment" in trace and "reads CAUSAL" in trace
