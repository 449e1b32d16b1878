"""The runtime runs a step as its program says: the same procedures, in the same order, on as many chunks."""

from __future__ import annotations

from typing import Any

import pytest
from e2e_models import build, plain, sample

import streambp_fx
from streambp_fx.passes.s6_schedule.program import Call
from streambp_fx.runtime.segments.segment_runner import SegmentRunner

POLICIES = ({}, {"save": "attention"}, {"every": 2}, {"save": "attention", "every": 2}, {"offload": "disk"})
TOKENS, CHUNK = 37, 8


def programs_of(call: Call) -> list[tuple[int, str]]:
    return [(call.segment, run.program) for _, run in call.procedure.runs()]


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", sample(POLICIES, POLICIES[-1]), ids=str)
def test_autograd_runs_the_program(
    family: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[int, str]] = []
    chunks: dict[tuple[int, str], int] = {}
    call = SegmentRunner.call

    def noted(runner: SegmentRunner, kind: str, *args: Any) -> Any:
        own = (runner.segment.index, kind)
        chunks[own] = chunks.get(own, 0) + 1
        if not ran or ran[-1] != own:
            ran.append(own)
        return call(runner, kind, *args)

    model = build(family, **({"num_hidden_layers": 4} if family == "llama" else {}))
    layers = model.config.num_hidden_layers
    streambp_fx.transform(model, chunk=CHUNK, loss_chunk=CHUNK, check="never", **options)
    monkeypatch.setattr(SegmentRunner, "call", noted)
    model(**plain(2, TOKENS)).loss.backward()
    program = streambp_fx.schedule(model).program
    program.check()
    said = [own for c in program.instructions.calls() for own in programs_of(c)]
    assert ran == said
    times = {own: said.count(own) for own in said}
    each = {own: count // times[own] for own, count in chunks.items()}
    assert set(each.values()) == {-(-TOKENS // CHUNK)} and len({s for s, _ in each}) == layers + 1


@pytest.mark.slow
def test_the_step_is_shown() -> None:
    model = streambp_fx.transform(build("llama"), chunk=CHUNK, check="never")
    model(**plain(2, TOKENS)).loss.backward()
    program = streambp_fx.schedule(model).program
    text = str(program)
    assert "call forward of segment 1" in text and "ceiling(T/chunk) chunks" in text
    assert "hand over 9 gradients of parameters" in text and "joint" in text
    assert "forward of segment 1: forward(x_" in text and "[B, T, 32]" in text
    found = program.to_dict()
    assert len(found["gradients"]) == len([p for p in model.parameters() if p.requires_grad])
