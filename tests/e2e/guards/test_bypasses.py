"""Ways around streaming: none of them is silent, and some are none. And `status`."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from e2e_check import step
from e2e_models import build, plain, sample
from torch import nn

import streambp_fx
from streambp_fx import StreamBPWarning, restore, status, transform
from streambp_fx.dynamo import each_frame

OPTIONS = {"chunk": 16, "loss_chunk": 16, "check": "never"}
BATCH = plain(2, 40)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield


def tiny(**options: Any) -> Any:
    """A transformed model of one layer."""
    return transform(build("llama", num_hidden_layers=1), **{**OPTIONS, **options})


def train(call: Callable[..., Any], steps: int = 2, **over: Any) -> list[str]:
    """Run steps; what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            call(**{**BATCH, **over}).loss.backward()
    return [str(w.message) for w in caught if issubclass(w.category, StreamBPWarning)]


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


# ---- graphs that end


class Looped(nn.Module):
    """A model whose graph ends within a loop or behind it."""

    def __init__(self, within: bool) -> None:
        super().__init__()
        self.model, self.within = build("llama", num_hidden_layers=1), within

    def forward(self, **given: Any) -> Any:
        for _ in range(2):
            out = self.model(**given)
            if self.within:
                torch._dynamo.graph_break()
        if not self.within:
            torch._dynamo.graph_break()
        return out


class LoopedAnew(Looped):
    """The same, in code of its own: Dynamo remembers of which code it compiles nothing."""

    def forward(self, **given: Any) -> Any:
        k = 0
        while k < 2:
            out, k = self.model.model(given["input_ids"]), k + 1
            torch._dynamo.graph_break()
        return {"loss": out[0].square().mean()}


@pytest.mark.slow
def test_a_graph_that_ends_within_a_loop() -> None:
    """Dynamo compiles nothing of the function then and calls no backend; what it calls is compiled."""
    model = Looped(within=True)
    told = train(torch.compile(model, backend="streambp", options=OPTIONS))
    assert len(told) == 1 and "Looped.forward runs unstreamed: a graph of it ends" in told[0], told
    assert "graph_break" in told[0] and __file__ in told[0]
    assert status(model).streamed


class Nested(nn.Module):
    """Functions that call each other, the last of which nobody can trace."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = self.middle(x)
        return x.sum()

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = self.inner(x)
        return x

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            torch._dynamo.graph_break()
        return x * self.scale


def test_a_line_is_said_once() -> None:
    """It ends the functions that lead to it, too; that they run unstreamed as well is no news."""
    call = torch.compile(Nested(), backend="streambp", options=OPTIONS)
    with pytest.warns(StreamBPWarning) as told:
        call(torch.ones(2, 33)).backward()
    ended = [str(w.message) for w in told if "a graph of it ends" in str(w.message)]
    name = r"^(Nested\.)?forward runs unstreamed"  # Python 3.10 knows no more of a function than its name
    assert len(ended) == 1 and re.match(name, ended[0]), ended
    with pytest.warns(StreamBPWarning, match=name):
        torch._dynamo.reset()
        torch.compile(Nested(), backend="streambp", options=OPTIONS)(torch.ones(2, 33)).backward()


def test_where_it_may_not_end_there_is_an_error_and_no_warning() -> None:
    call = torch.compile(LoopedAnew(True), backend="streambp", options=OPTIONS, fullgraph=True)
    with pytest.raises(Exception, match="graph_break"), warnings.catch_warnings():
        warnings.simplefilter("error", StreamBPWarning)
        call(**BATCH)


@pytest.mark.slow
def test_other_compilers_are_not_spoken_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", StreamBPWarning)
        torch.compile(LoopedAnew(True), backend="eager")(**BATCH)


def test_a_graph_that_ends_elsewhere() -> None:
    model = Looped(within=False)
    assert train(torch.compile(model, backend="streambp", options=OPTIONS)) == []
    assert status(model).streamed


class HeadBehind(nn.Module):
    """A graph ends between the layers and the loss head."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build("llama", num_hidden_layers=1)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        hidden = self.model.model(input_ids)[0]
        torch._dynamo.graph_break()
        logits = self.model.lm_head(hidden).flatten(0, 1)
        return {"loss": nn.functional.cross_entropy(logits, labels.flatten())}


@pytest.mark.slow
def test_a_part_behind_a_graph_break() -> None:
    model = HeadBehind()
    call = torch.compile(model, backend="streambp", options=OPTIONS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            call(BATCH["input_ids"], BATCH["labels"])["loss"].backward()
    told = [str(w.message) for w in caught if issubclass(w.category, StreamBPWarning)]
    assert len(told) == 1 and "what comes behind the graph break" in told[0], told
    assert f"{__file__}:" in told[0]


# ---- under another torch.compile: streamed, in a graph of its own


def compiled_before() -> tuple[Any, Any]:
    """Compiled and run before it is transformed: Dynamo notices."""
    model = build("llama", num_hidden_layers=1)
    call = torch.compile(model, backend="eager")
    call(**BATCH).loss.backward()
    transform(model, **OPTIONS)
    return model, call


def compiled_after() -> tuple[Any, Any]:
    model = tiny()
    return model, torch.compile(model, backend="eager")


def compiled_in_place() -> tuple[Any, Any]:
    model = tiny()
    model.compile(backend="aot_eager")
    return model, model


def function_around() -> tuple[Any, Any]:
    model = tiny()
    return model, torch.compile(lambda **batch: model(**batch), backend="eager")


def transformed_wrapper() -> tuple[Any, Any]:
    model = build("llama", num_hidden_layers=1)
    call = torch.compile(model, backend="eager")
    assert transform(call, **OPTIONS) is call
    return model, call


WAYS = [compiled_before, compiled_after, compiled_in_place, function_around, transformed_wrapper]


@pytest.mark.parametrize("way", sample(WAYS))
def test_streamed_under_another_compiler(way: Callable[[], tuple[Any, Any]]) -> None:
    want_loss, want = step(build("llama", num_hidden_layers=1), BATCH)
    model, call = way()
    model.zero_grad()
    output = call(**BATCH)
    output.loss.backward()
    assert output.logits is None and torch.allclose(output.loss.detach(), want_loss, rtol=1e-12)
    got = gradients(model)
    assert all(torch.allclose(got[n], g, rtol=1e-9, atol=1e-12) for n, g in want.items())
    found = status(call) if isinstance(call, nn.Module) else status(model)
    assert found.streamed and found.door == "transform" and found.streamed_steps == 1
    assert found.schedule is not None and found.schedule.options.chunk == 16
    with torch.no_grad():
        assert call(**BATCH).logits is not None, "evaluation is the other compiler's"
    restore(call if isinstance(call, nn.Module) else model)
    assert call(**BATCH).logits is not None
    assert status(model).door is None


def test_where_a_graph_may_not_end_it_is_refused() -> None:
    call = torch.compile(tiny(), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"(?s)streambp_fx.transform.*without fullgraph"):
        call(**BATCH)


@pytest.mark.slow
@pytest.mark.parametrize("strict", sample([False, True], True))
def test_an_export_is_of_the_models_own_forward(strict: bool) -> None:
    model = tiny().eval()
    with torch.no_grad():
        expected = model(**BATCH).logits
        exported = torch.export.export(model, (), {**BATCH, "use_cache": False}, strict=strict)
        assert torch.equal(exported.module()(**BATCH, use_cache=False).logits, expected)
    train(model.train())
    assert status(model).streamed


@pytest.mark.slow
def test_its_own_backend_takes_a_transformed_model_into_its_graph() -> None:
    model = tiny()
    train(torch.compile(model, backend="streambp", options=OPTIONS))
    found = status(model)
    assert found.streamed and found.streamed_steps == 2 and streambp_fx.schedule(model) is found.schedule


@pytest.mark.slow
def test_a_graph_that_serves_two_models_is_found_by_both() -> None:
    """Dynamo compiles one graph for models of one class and one size."""
    models = [build("llama", num_hidden_layers=1, seed=seed) for seed in range(2)]
    for model in models:
        train(torch.compile(model, backend="streambp", options=OPTIONS))
    (first, second) = map(status, models)
    assert first.streamed and second.streamed and second.schedule is first.schedule is not None
    # counted together
    assert first.streamed_steps == second.streamed_steps == 4


# ---- many graphs of one function


class Scaled(nn.Module):
    """A graph for each scale."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build("llama", num_hidden_layers=1)

    def forward(self, scale: str, **given: Any) -> Any:
        out = self.model(**given)
        out.loss = out.loss * float(scale)
        return out


@pytest.mark.slow
def test_more_graphs_than_dynamo_compiles_of_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Scaled()
    call = torch.compile(model, backend="streambp", options=OPTIONS)
    with torch._dynamo.config.patch(recompile_limit=2):
        assert not [said for k in range(4) for said in train(call, 1, scale=str(k))]
        assert (status(model).streamed_steps, status(model).unstreamed_steps) == (4, 0)
        monkeypatch.setattr(each_frame, "RECOMPILE_LIMIT", 4)
        (said,) = train(call, 1, scale="5")
        assert "has 4 graphs" in said and 'TORCH_LOGS="recompiles"' in said
        found = status(model)
        assert not found.streamed and found.why_not == said and found.unstreamed_steps == 1
        train(call, 1, scale="2")
        assert status(model).streamed and status(model).streamed_steps == 5


# ---- what stays unstreamed is said once


def test_evaluation_mode_is_said_if_it_is_differentiated() -> None:
    model = tiny().eval()
    model(**BATCH)
    assert status(model).unstreamed_steps == 0, "nobody has asked for a gradient"
    (said,) = train(model, 3)
    assert "evaluation mode" in said and "model.train()" in said
    found = status(model)
    assert not found.streamed and found.unstreamed_steps == 3 and found.why_not == said


@pytest.mark.slow
def test_evaluation_mode_under_another_compiler() -> None:
    model = tiny().eval()
    call = torch.compile(model, backend="eager")
    with torch.no_grad():
        assert train_without(call) == []
    (said,) = train(call, 3)
    assert "evaluation mode" in said and "another compiler" in said and "model.train()" in said
    assert train(call.train(), 2) == [] and status(model).streamed_steps == 2


def train_without(call: Callable[..., Any]) -> list[str]:
    """One forward; what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(**BATCH)
    return [str(w.message) for w in caught if issubclass(w.category, StreamBPWarning)]


@pytest.mark.slow
def test_without_a_compiler() -> None:
    model = tiny()
    with torch.compiler.set_stance("force_eager"):
        (said,) = train(model, 2)
    assert "force_eager" in said and "unstreamed" in said
    assert not train(model, 1)
    found = status(model)
    assert (found.streamed, found.streamed_steps, found.unstreamed_steps) == (True, 1, 2)
    assert found.since_step == 3 and found.reasons == {said: 2} and found.why_not is None


@pytest.mark.parametrize("name", ["TORCHDYNAMO_DISABLE", None])
def test_a_compiler_that_is_switched_off(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    want = step(build("llama", num_hidden_layers=1), BATCH)[0]
    if name is not None:
        monkeypatch.setenv(name, "1")
    with torch._dynamo.config.patch(disable=name is None):
        with pytest.warns(StreamBPWarning, match=rf"switched off by .*{name or 'disable'}"):
            assert step(model, BATCH)[0].equal(want)
        with pytest.raises(streambp_fx.CaptureError, match="switched off by"):
            streambp_fx.explain(model, 64)


@pytest.mark.parametrize("door", sample(["transform", "compile", "wrapper"], "compile"))
def test_warnings_name_the_line_of_the_user(door: str) -> None:
    """Not one of this project's, of PyTorch's or of transformers'."""
    model = build("llama", num_hidden_layers=1)
    options = {**OPTIONS, "offload": "host"}
    call = transform(model, **options) if door != "compile" else None
    call = torch.compile(model, backend="streambp", options=options) if call is None else call
    call = Around(model) if door == "wrapper" else call
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(**BATCH).loss.backward()
    (said,) = (w for w in caught if issubclass(w.category, StreamBPWarning))
    assert said.filename == __file__, said


@pytest.mark.slow
def test_hidden_states_are_asked_for() -> None:
    model = tiny()
    train(model, 1)
    assert train(model, 1, output_hidden_states=True)
    found = status(model)
    assert not found.streamed and found.since_step == 2 and "output_hidden_states" in (found.why_not or "")


@pytest.mark.slow
def test_memory_that_does_not_fit() -> None:
    for options in ({"memory": "1KiB"}, {"memory": "1KiB", "chunk": 16, "loss_chunk": 16}):
        model = transform(build("llama", num_hidden_layers=1), check="never", **options)
        (said,) = train(model, 2)
        assert "memory='1KiB' does not fit" in said and "KiB (store inputs" in said
    assert not train(transform(build("llama", num_hidden_layers=1), memory="1GiB", check="never"), 1)


@pytest.mark.slow
def test_host_memory_of_the_cpu() -> None:
    (said,) = train(tiny(offload="host"), 2)
    assert 'offload="host" does nothing for a model on the CPU' in said and 'offload="disk"' in said


def test_transforms_of_torch_func() -> None:
    eager, model = build("llama", num_hidden_layers=1), tiny()
    want = step(eager, BATCH)[1]

    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (), dict(BATCH)).loss

    with pytest.warns(StreamBPWarning, match=r"differentiated by torch\.func"):
        got = torch.func.grad(loss)(dict(model.named_parameters()))
    assert all(torch.allclose(got[n], g, rtol=1e-9, atol=1e-12) for n, g in want.items())
    assert status(model).unstreamed_steps == 1


# ---- status


def test_status_of_what_was_never_streamed() -> None:
    model = build("llama", num_hidden_layers=1)
    found = status(model)
    assert (found.door, found.streamed, found.since, found.schedule) == (None, False, None, None)
    assert "neither transformed nor compiled" in (found.why_not or "")
    transform(model.eval())
    assert "evaluation mode" in (status(model).why_not or "")
    with pytest.raises(TypeError, match="status needs"):
        status("llama")  # type: ignore[arg-type]


def test_status_as_text() -> None:
    model = tiny()
    train(model, 2)
    text = str(status(model))
    assert text.startswith("streamed by transform since 20") and "(training step 1)" in text
    assert "2 streamed, 0 unstreamed" in text and "last schedule: Schedule of" in text


class Around(nn.Module):
    """A wrapper."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.wrapped = model

    def forward(self, **given: Any) -> Any:
        return self.wrapped(**given)


@pytest.mark.parametrize("wrapper", sample([Around, nn.DataParallel], Around))
def test_status_of_a_wrapper(wrapper: Callable[[nn.Module], nn.Module]) -> None:
    model = tiny()
    around = wrapper(model)
    assert status(around).why_not == "no training step has come to it"
    train(model, 2)
    found = status(around)
    assert (found.door, found.streamed, found.streamed_steps, found.part) == ("transform", True, 2, None)
    assert found.schedule is status(model).schedule is not None


@pytest.mark.slow
def test_status_after_it_was_restored() -> None:
    model = tiny()
    restore(model)
    assert "put back" in (status(model).why_not or "") and status(model).since is None
    train(transform(model, **OPTIONS), 2)
    restore(model)
    found = status(model)
    assert (found.door, found.streamed, found.streamed_steps) == (None, False, 2)
    assert (
        "put back" in (found.why_not or "")
        and found.since is not None
        and "(" not in str(found).split("\n")[0]
    )
    train(model, 1)
    assert status(model).streamed_steps == 2
    transform(model, **OPTIONS)
    assert status(model).streamed_steps == 0 and status(model).door == "transform"


@pytest.mark.slow
def test_a_forward_that_was_put_over_it() -> None:
    """The backbone streams, the loss head does not: the status says so."""
    model = tiny()
    model.forward = type(model).forward.__get__(model)
    train(model, 1)
    assert "LlamaModel" in (status(model).part or "") and "only a part" in str(status(model))


class Other(nn.Module):
    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        raise NotImplementedError


def test_a_forward_that_runs_past_it() -> None:
    model = transform(Other())
    streamed, model.forward = model.forward, lambda **batch: None
    assert callable(streamed), "somebody keeps it"
    assert "its forward is now" in (status(model).why_not or "")


def test_steps_of_a_graph_that_is_not_streamed_are_counted() -> None:
    model = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 3))
    call = torch.compile(model, backend="streambp")
    with pytest.warns(StreamBPWarning, match="no op of the graph reads along"):
        call(torch.zeros(2, 9, dtype=torch.long)).sum().backward()
    found = status(model)
    assert found.door == "torch.compile" and found.unstreamed_steps == 1
    assert "no op of the graph reads along" in (found.why_not or "")
