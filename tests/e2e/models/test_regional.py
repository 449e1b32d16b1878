"""Regional compilation: decoder layers one by one, sharing one compiled graph."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from e2e_check import assert_close_grads, grads, in_double, step
from e2e_memory import measure
from e2e_models import DEVICE, build, padded, plain, sample

import streambp_fx
from streambp_fx import backend
from streambp_fx.measure.live_bytes import live_bytes_compiled

OPTIONS = {"chunk": 16, "loss_chunk": 8}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def compile_layers(model: Any) -> Any:
    for layer in model.layers:
        layer.compile(backend="streambp", options=OPTIONS)
    return model


@pytest.mark.parametrize("family", sample(["llama", "gemma2"], "llama"))
def test_layers_are_streamed_and_share_a_schedule(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    analysed: list[Any] = []
    real = backend.analyze
    monkeypatch.setattr(backend, "analyze", lambda *a: analysed.append(real(*a)) or analysed[-1])
    kinds = {"layer_types": ["full_attention"] * 4} if family == "gemma2" else {}
    factory = functools.partial(build, family, num_hidden_layers=4, **kinds)
    with in_double(factory):
        eager = factory()
        model = copy.deepcopy(eager)
        compile_layers(model.model)
        for batch in (plain(2, 67), plain(2, 80), plain(2, 9), padded(50, "right")):
            _, want = step(eager, batch)
            _, got = step(model, batch)
            assert_close_grads(got, want, 1e-9)
    shared = [f for f in analysed if len(f.segments) == 1 and f.segments[0].chunked and f.mixings]
    # with sdpa, one graph without a mask and one with; eager attention always has one
    assert len(analysed) == len(shared) == (2 if family == "llama" else 1)


@pytest.mark.slow
def test_memory_is_that_of_the_whole_model() -> None:
    """The stack of layers compiled as one, or layer by layer: the peak differs by less than a tenth."""
    factory = functools.partial(
        build, "llama", dtype=torch.float32, num_hidden_layers=6, max_position_embeddings=1024
    )
    ids = plain(1, 1000)["input_ids"]
    peaks = {}
    for name in ("whole", "regional", "eager"):
        model = factory().model
        if name == "whole":
            call = torch.compile(model, backend="streambp", options={"chunk": 100})
        elif name == "regional":
            call = model
            for layer in model.layers:
                layer.compile(backend="streambp", options={"chunk": 100})
        else:
            call = model
        hidden = factory().model(input_ids=ids).last_hidden_state.detach()
        embeds = torch.randn_like(hidden)

        def loss(call: Any = call, embeds: torch.Tensor = embeds) -> torch.Tensor:
            return call(inputs_embeds=embeds).last_hidden_state.square().mean()

        loss().backward()
        model.zero_grad()
        known = [*model.parameters(), *model.buffers(), embeds]
        if name == "eager":
            peaks[name] = measure(lambda loss=loss: loss().backward(), known).peak
        else:
            peaks[name] = live_bytes_compiled(loss, known).peak
    assert peaks["regional"] < 1.1 * peaks["whole"], peaks
    assert peaks["regional"] * 2 < peaks["eager"], peaks


def test_one_layer_by_hand() -> None:
    """A layer called without its model: hidden states and rotary tables are all there is."""
    model = build("llama").model
    layer, twin = model.layers[0], copy.deepcopy(model.layers[0])
    call = torch.compile(twin, backend="streambp", options=OPTIONS)
    for length in (67, 50):
        hidden = torch.randn(2, length, 32, dtype=torch.float64, device=DEVICE, requires_grad=True)
        positions = torch.arange(length, device=DEVICE)[None]
        tables = model.rotary_emb(hidden, positions)
        found = []
        for own, run in ((layer, layer), (twin, call)):
            own.zero_grad()
            hidden.grad = None
            run(hidden, position_embeddings=tables, attention_mask=None).square().mean().backward()
            found.append({**grads(own), "input": hidden.grad})
        assert_close_grads(found[1], found[0], 1e-6)
    (segment,) = streambp_fx.schedule(twin).segments
    assert segment.chunked and segment.reach.name == "CAUSAL"
