"""Loops along the sequence: in models of transformers, what their steps hold, which are named as unrolled."""

from __future__ import annotations

import copy
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from adversaries.loops.parts import Layer
from e2e_check import CHUNK, assert_all_chunked, compare, transform
from e2e_memory import live
from e2e_models import VOCAB, padded, plain, sample
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.rwkv import modeling_rwkv

import streambp_fx
from benchmarks.families.configs import build
from streambp_fx.dynamo.loops import scanning
from streambp_fx.measure.in_float64 import true_double
from streambp_fx.passes.graph.ops.recurrence import RECURRENCE
from streambp_fx.transform import schedules

right = scanning.scan
BATCHES = {"67": plain(2, 67), "11": plain(3, 11), "right": padded(45, "right"), "left": padded(45, "left")}


def recurrences_of(model: Any) -> int:
    found = streambp_fx.schedule(model)
    assert found is not None
    return sum(n.target is RECURRENCE for s in found.facts.segments for n in s.nodes)


@pytest.mark.slow
def test_recurrent_gemma() -> None:
    eager = build("recurrent_gemma").double()
    with true_double(eager):
        streamed = transform(copy.deepcopy(eager))
        compare(eager, streamed, BATCHES, 1e-9)
    assert_all_chunked(streamed)
    assert recurrences_of(streamed) >= 2


@pytest.fixture
def rwkv_in_float64(tmp_path: Path) -> types.ModuleType:
    """The code of the model with float64 in place of float32, in a file, from which its loop is read."""
    text = Path(modeling_rwkv.__file__).read_text()
    path, name = tmp_path / "modeling_rwkv_in_float64.py", "transformers.models.rwkv.in_float64"
    path.write_text(text.replace("float32", "float64").replace(".float()", ".double()"))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[name]


@pytest.mark.slow
def test_rwkv(rwkv_in_float64: types.ModuleType) -> None:
    """Three carried values, one of which begins with the lowest number, and a trained decay."""
    torch.manual_seed(0)
    eager = rwkv_in_float64.RwkvForCausalLM(build("rwkv").config).double().train()
    with true_double():
        streamed = transform(copy.deepcopy(eager))
        compare(eager, streamed, BATCHES, 1e-9)
    assert_all_chunked(streamed)
    assert recurrences_of(streamed) >= 2


class Model(nn.Module):
    """A small causal LM of such layers."""

    def __init__(self, layers: list[nn.Module], width: int = 12, vocab: int = VOCAB) -> None:
        super().__init__()
        self.embed, self.layers, self.head = (
            nn.Embedding(vocab, width),
            nn.ModuleList(layers),
            nn.Linear(width, vocab),
        )

    def forward(self, input_ids: Tensor, labels: Tensor) -> CausalLMOutput:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        logits = self.head(x)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)


@pytest.mark.parametrize("chunk", sample([512, 999], 512))
def test_the_peak_is_predicted(chunk: int) -> None:
    torch.manual_seed(0)
    model, given = Model([Layer(48) for _ in range(3)], 48), plain(1, 999)
    planned = streambp_fx.explain(model, seq_len=999, chunk=chunk, loss_chunk=64)
    streambp_fx.transform(model, chunk=chunk, loss_chunk=64, check="never")
    model(**given).loss.backward()
    expected = planned.cost.peak(planned.cost.sizes(999, chunk)).total
    assert live(model, given) == pytest.approx(expected, rel=0.01)
    assert len({sum(s.saved.values()) for s in planned.segments if s.mixings}) == 1


def test_one_program_for_all_lengths() -> None:
    torch.manual_seed(0)
    eager = Model([Layer(), Layer()]).double()
    streamed = transform(copy.deepcopy(eager))
    compare(eager, streamed, {str(t): plain(2, t) for t in (97, 16, 1 + CHUNK, 250)}, 1e-9)
    assert len(schedules(streamed)) == 1


class Numbered(Layer):
    """A loop that is no step: it reads the number of the row."""

    def run(self, gate: Tensor, value: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        state, out = torch.zeros_like(value[:, 0]), torch.zeros_like(value)
        for t in range(value.shape[1]):
            state = gate[:, t] * state / (t + 1) + value[:, t]
            out[:, t] = state
        return out, state


class Asks(Layer):
    """A function of its own is asked about the state in each round: the loop does not say for what."""

    kind = "is the first"

    def run(self, gate: Tensor, value: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self.first = state = torch.zeros_like(value[:, 0])
        out = torch.zeros_like(value)
        for t in range(value.shape[1]):
            state = gate[:, t] * state + self.more(state) * value[:, t]
            out[:, t] = state
        return out, state

    def more(self, state: Tensor) -> float:
        if self.kind == "has a gradient":
            return 2.0 if state.requires_grad else 1.0
        if self.kind == "lies as it does":
            return 2.0 if state.stride(0) == 1 else 1.0
        return 1.0 if state is self.first else 2.0


@pytest.mark.parametrize("kind", sample(["is the first", "has a gradient"], "is the first"))
def test_a_body_that_asks_for_more_than_numbers_is_unrolled(kind: str) -> None:
    torch.manual_seed(0)
    eager = Model([Asks()]).double()
    eager.layers[0].kind = kind  # type: ignore[assignment]
    streamed = transform(copy.deepcopy(eager))
    with pytest.warns(
        streambp_fx.StreamBPWarning, match=r"loops\.py:\d+: (a step of it does not|it cannot be)"
    ):
        compare(eager, streamed, {"9": plain(2, 9)}, 1e-12, unchunked=None)


class Gated(Layer):
    """A layer that begins as the identity: no number and no gradient shows what is behind the factor."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * super().forward(x)


class Narrows(Layer):
    """A loop that begins in float32, and goes on in half precision under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        h, made = torch.zeros(x.shape[0], x.shape[2], dtype=torch.float32, device="cpu"), []
        for row in x.unbind(1):
            h = torch.tanh(self.gate(row) + self.value(h))
            made.append(h)
        return torch.stack(made, 1)


def test_a_loop_under_autocast() -> None:
    torch.manual_seed(0)
    eager = Model([Narrows(), Narrows()])
    streamed = transform(copy.deepcopy(eager))
    with torch.autocast("cpu", torch.bfloat16):
        compare(eager, streamed, {"35": plain(2, 35)}, 3e-2)
    assert recurrences_of(streamed) >= 2


class Remembers(Layer):
    """A layer that sets attributes before its loop and behind it."""

    last: Tensor | None = None
    count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.last, self.count = None, 1
        made, last = self.run(self.gate(x).sigmoid(), self.value(x))
        self.last, self.count = last.detach(), 2
        return made


def test_attributes_that_are_set_behind_a_loop() -> None:
    torch.manual_seed(0)
    eager = Model([Remembers(), Remembers()]).double()
    streamed = transform(copy.deepcopy(eager))
    compare(eager, streamed, {str(t): plain(2, t) for t in (35, 20)}, 1e-9)
    assert recurrences_of(streamed) >= 2
    for one, other in zip(eager.layers, streamed.layers, strict=True):
        assert one.count == other.count == 2
        torch.testing.assert_close(one.last, other.last, rtol=1e-12, atol=1e-12)


def shifted(*args: Any) -> Any:
    """A scan that is wrong: each result is that of the row before."""
    carried, made = right(*args)
    return carried, tree_map(lambda x: torch.roll(x, 1, 0), made)


@pytest.mark.parametrize("layer", sample([Layer, Gated], Gated))
def test_a_scan_that_is_not_the_loop_is_unrolled(layer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanning, "scan", shifted)
    torch.manual_seed(0)
    eager = Model([layer()]).double()
    streamed = transform(copy.deepcopy(eager))
    with pytest.warns(streambp_fx.StreamBPWarning, match="a step of it does not give what the loop gives"):
        compare(eager, streamed, {"9": plain(2, 9)}, 1e-12, unchunked=None)


def test_a_loop_that_is_unrolled_is_named() -> None:
    model = Model([Numbered()])
    streambp_fx.transform(model, chunk=16)
    with pytest.warns(
        streambp_fx.StreamBPWarning, match=r"test_loops\.py:\d+: it reads the number of the row"
    ):
        model(**plain(1, 9)).loss.backward()
