"""States of recurrences that are kept for the backward: the same gradients, and no second sweep for them."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from adversaries import recurrences
from e2e_check import assert_close_grads, compare, in_double, transform
from e2e_models import sample
from e2e_subject import WIDTH
from test_architectures import BATCHES, batch, exact_and_streamed_whole, model_of
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.mamba.modeling_mamba import mamba_selective_scan

import streambp_fx
from benchmarks.families.configs import build
from streambp_fx.measure.live_bytes import peak_live_bytes
from streambp_fx.passes.s6_schedule import kept_states
from streambp_fx.passes.s6_schedule.checker import UnsoundStep, check_step
from streambp_fx.passes.s6_schedule.program import Call, StepProgram, unrolled
from streambp_fx.passes.s6_schedule.program.values import ValueKind
from streambp_fx.passes.step.saving import Piece, Price, Saving
from streambp_fx.schedule import Schedule

STATES = recurrences.STATES
# A scan, the same beside an attention in each layer, both in turn, and delta rules.
FAMILIES = ["mamba2", "falcon_h1", "mamba", "jamba", "qwen3_next", "kimi_linear"]


# Of a third of the rows all products are saved, of the rest nothing.
SOME = Saving(((Piece(Fraction(1, 3), Price(1, 4096)), Piece(Fraction(1), None)),) * 8)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """However large they are."""
    monkeypatch.setattr(kept_states, "SMALL", Fraction(1000))


def programs_of(schedule: Schedule, name: str) -> list[set[str]]:
    """Of each call of a procedure of a segment that keeps states: the programs that it runs."""
    calls = (c for c in schedule.cost.step_program.calls() if c.way.keeps_states and c.procedure_name == name)
    return [{run.program for _, run in c.procedure.runs()} for c in calls]


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("family", sample(FAMILIES, "mamba2"))
def test_exact(family: str) -> None:
    streamed = exact_and_streamed_whole(family, BATCHES)
    backwards = programs_of(streambp_fx.schedule(streamed), "backward")
    columns = {"columns"} if family == "falcon_h1" else set()  # keys and values, of an attention beside it
    assert backwards and all(found == {"joint"} | columns for found in backwards)


class Layer(nn.Module):
    """A scan of wide rows, to each of which the one before it was added: those are columns."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.norm = nn.Linear(WIDTH, 3 * WIDTH + 2 * STATES), nn.LayerNorm(WIDTH)
        self.decay, self.out = recurrences.Decay(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.wide(self.norm(x))
        moved = (F.pad(wide, (0, 0, 1, -1)) + wide).transpose(1, 2)
        own, gate, dt, b, c = moved.split([WIDTH, WIDTH, WIDTH, STATES, STATES], 1)
        a = -self.decay.a.float().exp()
        made = mamba_selective_scan(own, dt, a, b, c, self.decay.d, z=gate, delta_softplus=True)
        return x + self.out(made.transpose(1, 2))


class Moved(nn.Module):
    """Layers in which there are columns besides the state of a scan, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(512, WIDTH), nn.Linear(WIDTH, 512)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=-100)
        return CausalLMOutput(loss=loss)


@pytest.mark.slow
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    "saved",
    [pytest.param("inputs", marks=pytest.mark.slow, id="inputs"), pytest.param(SOME, id="some values")],
)
def test_columns_are_made_again_without_them(saved: str | Saving, monkeypatch: pytest.MonkeyPatch) -> None:
    segment = importlib.import_module("streambp_fx.passes.s3_cut.segment")
    monkeypatch.setattr(segment, "EXPENSIVE", 1.5)  # layers stay whole

    def factory() -> Moved:
        torch.manual_seed(0)
        return Moved().double()

    given = {n: {k: v for k, v in b.items() if k in ("input_ids", "labels")} for n, b in BATCHES.items()}
    with in_double(factory):
        eager, streamed = factory(), transform(factory(), save=saved)
        compare(eager, streamed, given, 1e-9)
        backwards = programs_of(streambp_fx.schedule(streamed), "backward")
    assert len(backwards) == (
        2 if saved == "inputs" else 3
    )  # the first is run again with the table before it
    assert all(found == {"columns", "joint"} for found in backwards)


def assert_printed_code_gives(want: dict[str, Tensor], schedule: Schedule, eager: nn.Module) -> None:
    """The printed program has a function for the columns, and makes the same gradients."""
    code, namespace = schedule.code(), dict[str, Any]()
    assert "_columns_chunk" in code
    exec(compile(code, "printed.py", "exec"), namespace)
    inputs = {k: v for k, v in BATCHES["padding: none"].items() if k in ("input_ids", "labels")}
    _, got = namespace["step"](
        **inputs, parameters=dict(eager.named_parameters()), buffers=dict(eager.named_buffers())
    )
    assert_close_grads({n: got.get(n) for n in want}, want, 1e-12, "printed")


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("options", [{"save": "attention"}, {"every": 2}, {"order": "chunks"}], ids=str)
@pytest.mark.slow
def test_with_other_policies(options: dict[str, Any]) -> None:
    """What spares memory on purpose keeps none."""
    with in_double(functools.partial(model_of, "falcon_h1")):
        streamed = model_of("falcon_h1")
        eager = copy.deepcopy(streamed)
        transform(streamed, **options)
        compare(eager, streamed, BATCHES, 1e-9)
        assert bool(programs_of(streambp_fx.schedule(streamed), "backward")) == ("save" in options)


@pytest.mark.slow
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("family", ["mamba2", pytest.param("falcon_h1", marks=pytest.mark.slow)])
def test_they_stay_where_the_backward_runs_twice(family: str) -> None:
    """With a loss of one's own, of which the graph is kept."""
    model = model_of(family)
    transform(model, logits="keep")
    inputs, names = batch(67, (0, 3)), [n for n, _ in model.named_parameters()]
    inputs.pop("labels")
    found = []
    for times in (2, 1):
        loss = model(**inputs).logits.square().mean()
        for left in reversed(range(times)):
            gradients = torch.autograd.grad(loss, list(model.parameters()), retain_graph=left > 0)
            found.append(dict(zip(names, gradients, strict=True)))
    assert programs_of(streambp_fx.schedule(model), "backward")
    for other in found[1:]:
        assert_close_grads(other, found[0], 1e-12, "again")


def kept_in(chunk: int, tokens: int = 1024) -> tuple[Any, bool]:
    planned = streambp_fx.explain(build("mamba2"), seq_len=tokens, chunk=chunk, loss_chunk=64)
    return planned, bool(programs_of(planned, "forward"))


@pytest.mark.slow
def test_small_ones_are_kept() -> None:
    """The longer a chunk is, the fewer there are; the plan says so for each length."""
    assert [kept_in(chunk)[1] for chunk in (16, 512)] == [False, True]
    cost = kept_in(512)[0].cost
    few = cost.step_of(cost.sizes(1024, 16))
    assert not any(c.way.keeps_states for c in few.calls())


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mamba2", pytest.param("falcon_h1", marks=pytest.mark.slow)])
def test_the_peak_is_predicted(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To a hundredth, with states that are as large as the rows."""
    monkeypatch.setattr(kept_states, "SMALL", Fraction(1000))
    model, given = build(family), batch(1024, (0,))
    planned = streambp_fx.explain(model, seq_len=1024, chunk=128, loss_chunk=64)
    assert programs_of(planned, "forward")
    streambp_fx.transform(model, chunk=128, loss_chunk=64, check="never")
    run: Callable[[], None] = lambda: model(**given, use_cache=False).loss.backward()  # noqa: E731
    run()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    known = [*model.parameters(), *gradients, *model.buffers(), *given.values()]
    expected = planned.cost.peak(planned.cost.sizes(1024, 128)).total
    assert peak_live_bytes(run, known) == pytest.approx(expected, rel=0.01)


# ---- what the checker says


def without_states(call: Call, which: str) -> Call:
    kept = tuple(v for v in getattr(call, which) if v.kind is not ValueKind.STATE)
    return dataclasses.replace(call, **{which: kept})


def made_again(call: Call) -> Call:
    return dataclasses.replace(call, way=dataclasses.replace(call.way, keeps_states=False))


BROKEN: dict[str, tuple[str, Callable[[Call], Call]]] = {
    "not handed over": ("forward", lambda c: without_states(c, "results")),
    "not taken": ("backward", lambda c: without_states(c, "inputs")),
    "made again": ("backward", made_again),
    "not kept": ("forward", lambda c: made_again(without_states(c, "results"))),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_steps_are_rejected(what: str) -> None:
    program = kept_in(512)[0].cost.step_program
    check_step(program)
    name, change = BROKEN[what]
    with pytest.raises(UnsoundStep):
        check_step(changed(program, name, change))


def changed(program: StepProgram, name: str, change: Callable[[Call], Call]) -> StepProgram:
    """The last such call of a segment that keeps states is another one."""
    calls = [c for c in program.calls() if c.way.keeps_states and c.procedure_name == name]
    put: Any = lambda i: change(i) if i is calls[-1] else i  # noqa: E731
    flat = [[put(i) for i in unrolled(body)] for body in (program.forward, program.backward)]
    return program.with_parts(*flat)
