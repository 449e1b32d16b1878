"""The page "Adding an instruction", tried: a new kind is made, run, checked, counted and printed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from graphs import WIDTH
from torch import Tensor, nn
from torch.nn import functional as F

import streambp_fx
from streambp_fx.cost import procedures
from streambp_fx.passes.s5_lower import programs
from streambp_fx.passes.step import build, checker, text
from streambp_fx.passes.step.buffer_states import BufferStates
from streambp_fx.passes.step.faults import Fault
from streambp_fx.passes.step.instructions import Buffer
from streambp_fx.passes.step.procedure import Procedure
from streambp_fx.runtime.segments import interpreter
from streambp_fx.runtime.segments.interpreter import Frame
from streambp_fx.show.code import sweeps


# 1. what it is: passes/step/instructions.py, and in the union `Instruction`
@dataclass(frozen=True)
class Clip:
    """Elements of a finished gradient that are larger than a limit become the limit."""

    buffer: Buffer
    limit: float


# 2. where it is made: passes/step/build.py
class Builder(build.Builder):
    def backward(self) -> Procedure:
        made = super().backward()
        return replace(made, body=(*made.body, *(Clip(b, LIMIT) for b in self.gradients)))


# 3. what it does to tensors: `EXECUTE` in runtime/segments/interpreter.py
def run_clip(instruction: Clip, frame: Frame) -> None:
    frame.tensors[instruction.buffer].clamp_(-instruction.limit, instruction.limit)


# 4. what must be true of it: `CHECKS` in passes/step/checker.py
def check_clip(state: BufferStates, instruction: Clip) -> None:
    state.complete(instruction.buffer)
    if instruction.limit <= 0:
        raise Fault(f"nothing is left of {instruction.buffer.name}")


# 5. its line: `LINES` in passes/step/text.py
def clip_line(instruction: Clip) -> str:
    return f"clip {instruction.buffer.name} at {instruction.limit}"


# 6. its Python: `PRINT` in show/code/sweeps.py
def print_clip(code: sweeps.Sweeps, instruction: Clip, full: bool) -> list[str]:
    name, limit = code.code.names[instruction.buffer], instruction.limit
    return [f"    {name}.clamp_({-limit}, {limit})"]


# 7. what it holds, and what it costs: `COUNT` in cost/procedures.py; nothing of its own
def count_clip(walk: procedures.ProcedureWalk, instruction: Clip, within: Any) -> Iterator[Any]:
    yield from ()


# end
LIMIT = 1e-3


class Layers(nn.Module):
    """Three causal layers; in eager the gradients between them are clipped by hooks."""

    def __init__(self, clipped: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(3))
        self.clipped = clipped

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            if self.clipped:
                x = x * 1
                x.register_hook(lambda g: g.clamp(-LIMIT, LIMIT))
            q, k, v = (y[:, None] for y in layer(x).chunk(3, -1))
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]
        return F.cross_entropy(self.head(x).flatten(0, 1), input_ids.flatten(), reduction="sum")


@pytest.fixture
def clip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(interpreter.EXECUTE, Clip, run_clip)
    monkeypatch.setitem(checker.CHECKS, Clip, check_clip)
    monkeypatch.setitem(text.LINES, Clip, clip_line)
    monkeypatch.setitem(sweeps.PRINT, Clip, print_clip)
    monkeypatch.setitem(procedures.COUNT, Clip, count_clip)
    monkeypatch.setattr(programs, "Builder", Builder)


@pytest.mark.usefixtures("clip")
def test_a_new_instruction_is_run_and_shown_everywhere() -> None:
    torch._dynamo.reset()
    eager, model = Layers(clipped=True).double(), Layers(clipped=False).double()
    ids = torch.arange(58).view(2, 29) % 11
    eager(ids).backward()
    streambp_fx.transform(model, chunk=8, loss_chunk=5, check="never", on_error="raise")
    model(ids).backward()
    for (name, want), got in zip(eager.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-9, atol=1e-12, msg=name)
    free = Layers(clipped=False).double()
    free(ids).backward()
    assert not free.embed.weight.grad.allclose(model.embed.weight.grad), "something was clipped"
    schedule = streambp_fx.schedule(model)
    assert re.search(rf"clip grad_x_\w+ at {LIMIT}", str(schedule.program))
    assert schedule.cost.peak(schedule.cost.sizes(29)).total > 0
    printed: dict[str, Any] = {}
    exec(compile(schedule.code(), "printed.py", "exec"), printed)
    _, gradients = printed["step"](ids, dict(model.named_parameters()))
    for name, parameter in eager.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.usefixtures("clip")
def test_a_wrong_one_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "LIMIT", 0)
    torch._dynamo.reset()
    model = Layers(clipped=False).double()
    streambp_fx.transform(model, chunk=8, loss_chunk=5, check="never", on_error="raise")
    with pytest.raises(streambp_fx.CompileError, match=r"at `clip grad_x_.* at 0`: nothing is left of"):
        model(torch.arange(58).view(2, 29) % 11).backward()
