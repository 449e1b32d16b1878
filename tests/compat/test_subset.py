"""What has to work with every version that is supported: `make compat` runs this in an environment for each.

A column of docs/versions.md is a function of this file. By default the quickest case of a few of them runs.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e_check import assert_all_chunked, assert_close_grads, compare, grads, in_double, pair, step, transform
from e2e_models import CHUNK, LOSS_CHUNK, build, padded, perturb, plain, sample
from transformers import LlamaConfig
from transformers.integrations import moe

import streambp_fx
from benchmarks.families import configs
from benchmarks.families.worker import plain_experts
from streambp_fx.cli import main
from streambp_fx.passes.graph.tracing import without_saved_tensors_hooks
from streambp_fx.passes.s5_lower import programs

OPTIONS = {"chunk": CHUNK, "loss_chunk": LOSS_CHUNK}
#: Plain attention; windows; learned positions and biases; experts; experts with sinks; a recurrence.
FAMILIES = ("llama", "gemma3_text", "gpt2", "qwen3_moe", "gpt_oss", "qwen3_next")
OF_BENCHMARKS = ("qwen3_moe", "gpt_oss", "qwen3_next")
PADDED = {"padded": padded(90, "right")}
LENGTHS = {"plain": plain(2, 67), "longer": plain(2, 90)}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    # an error amid a compilation, as of a warning in a test that fails, leaves it counted as under way
    handler = torch._dynamo.callback.callback_handler
    handler._CompilationCallbackHandler__pending_callbacks_counter = 0
    torch._dynamo.reset()
    with without_saved_tensors_hooks():  # that a checkpoint left in which another test failed
        yield


def model_of(family: str) -> Any:
    if family not in OF_BENCHMARKS:
        return build(family)
    model = configs.build(family).double()
    perturb(model, 1)
    if not hasattr(moe, "_grouped_mm_fallback"):  # before transformers 5.3
        plain_experts(model, "batched_mm")  # what it has by default has no kernel for float64
    return model


# ---- exact, by both doors


@pytest.mark.parametrize("family", sample(FAMILIES))
def test_transform(family: str) -> None:
    """`streambp_fx.transform`: loss and every gradient in float64, with padding, every segment in chunks."""
    factory = functools.partial(model_of, family)
    with in_double(factory):
        eager, streamed = pair(factory)
        plain_experts(eager)
        compare(eager, streamed, PADDED, 1e-9)
        assert_all_chunked(streamed, at_least=4)


class Compiled:
    """A model and what `torch.compile` made of it, as one that `step` can call."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.call = torch.compile(model, backend="streambp", options={**OPTIONS, "check": "never"})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, **batch: Any) -> Any:
        return self.call(**batch, use_cache=False)


@pytest.mark.parametrize("family", sample(FAMILIES))
def test_compile(family: str) -> None:
    """`torch.compile(model, backend="streambp")`: the same without padding, at two lengths."""
    factory = functools.partial(model_of, family)
    with in_double(factory):
        eager = factory()
        streamed = copy.deepcopy(eager)
        plain_experts(eager)
        compiled = Compiled(streamed)  # its schedule is there as long as it is
        compare(eager, compiled, LENGTHS, 1e-9, unchunked=None)
        assert_all_chunked(streamed, at_least=4)


# ---- objectives


def log_probabilities(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Of the tokens given those before; (B, T - 1)."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)


OBJECTIVES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "mean": lambda m, ids: -log_probabilities(m, ids).mean(),
    # chosen and rejected answers in one batch: what the rows of a batch are is seen in a view
    "pairs": lambda m, ids: -(log_probabilities(m, ids).sum(1).view(2, -1).sum(1) * 0.01).sigmoid().sum(),
}


@pytest.mark.parametrize("objective", sample(OBJECTIVES))
def test_objective(objective: str) -> None:
    """A function of a model, compiled, at two lengths."""
    eager = build("llama")
    model, loss = copy.deepcopy(eager), OBJECTIVES[objective]
    call = torch.compile(functools.partial(loss, model), backend="streambp", options=OPTIONS)
    for length in (67, 90):
        ids = plain(4, length, holes=False)["input_ids"]
        for one, run in ((eager, functools.partial(loss, eager)), (model, call)):
            one.zero_grad()
            run(ids).backward()
        assert_close_grads(grads(model), grads(eager), 1e-9)
    assert streambp_fx.schedule(model) is not None, "nothing was streamed"


WAYS: dict[str, Callable[[Any], Any]] = {
    "the model": lambda m: torch.compile(m, backend="eager"),
    "a function": lambda m: torch.compile(lambda **batch: m(**batch), backend="aot_eager"),
}


@pytest.mark.parametrize("way", sample(WAYS))
def test_another(way: str) -> None:
    """A transformed model under `torch.compile` with another backend: streamed, and so counted."""
    eager, batch = build("llama"), plain(2, 67)
    model = transform(copy.deepcopy(eager))
    call = WAYS[way](model)
    want, _ = step(eager, batch)
    loss = call(**batch, use_cache=False).loss
    loss.backward()
    torch.testing.assert_close(loss.detach(), want, rtol=1e-12, atol=0)
    assert_close_grads(grads(model), grads(eager), 1e-9)
    assert streambp_fx.status(model).streamed_steps == 1


# ---- programs


@pytest.mark.slow
def test_programs(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """One program serves all chunks and all lengths; nothing is logged as an error."""
    traced: list[str] = []
    real = programs.traced_program

    def counted(owner: Any, kind: str, *rest: Any) -> Any:
        traced.append(kind)
        return real(owner, kind, *rest)

    monkeypatch.setattr(programs, "traced_program", counted)
    model = transform(build("llama"), check="never")
    counts = []
    with caplog.at_level(logging.WARNING):
        for length in (67, 80, 33, 129):
            step(model, plain(2, length))
            counts.append(len(traced))
    assert counts[0] <= 6 and counts == counts[:1] * 4, (counts, traced)
    assert not [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None, reason="Inductor needs a C++ compiler"
)
def test_inductor() -> None:
    """`body="inductor"`: gradients in float32, at two lengths."""
    eager = build("llama", dtype=torch.float32, num_hidden_layers=1)
    model = transform(copy.deepcopy(eager), body="inductor", check="never")
    compare(eager, model, LENGTHS, 1e-5)


# ---- trainers


@pytest.mark.slow
def test_trainer(tmp_path: Path) -> None:
    """TRL's `SFTTrainer`, or `Trainer` without TRL, with the callback: the log, and every parameter."""
    trainer_runs = pytest.importorskip("trainer_runs")
    trainer = trainer_runs.hf if importlib.util.find_spec("trl") is None else trainer_runs.sft
    run = trainer_runs.check(trainer, tmp_path, how="callback", gradient_checkpointing=False)
    assert [entry["streambp/chunk"] for entry in run.log if "loss" in entry] == [CHUNK] * 5


# ---- the schedule, the planner, the command line


@pytest.mark.slow
def test_schedule() -> None:
    """The schedule of a step that is not run: what it says, as text and as a page."""
    schedule = streambp_fx.explain(build("llama"), seq_len=1000, batch_size=3, chunk=300, loss_chunk=64)
    assert [s.kind for s in schedule.segments] == ["unchunked", "layer", "layer", "rows"]
    assert [schedule.chunks(s) for s in schedule.segments] == [1, 4, 4, 16]
    assert schedule.stored_bytes_per_row() == 2 * 3 * 32 * 8
    text = str(schedule)
    assert text.startswith("Schedule of 4 segments for 1000 tokens, chunk 300") and "causal" in text


@pytest.mark.slow
def test_verify() -> None:
    """`verify` finds a step right, and says so."""
    found = streambp_fx.verify(build("llama"), plain(2, 67), **OPTIONS)
    assert found.ok, str(found)


@pytest.mark.slow
def test_planner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`streambp-fx plan`: the longest sequence is longer than with checkpointing by far."""
    sizes = {"vocab_size": 900, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaConfig(**sizes, **heads, max_position_embeddings=1 << 17).save_pretrained(tmp_path)
    found = streambp_fx.plan(tmp_path, memory="64MiB")
    assert found.fits and found.eager_seq_len and found.checkpointing_seq_len and found.max_seq_len
    assert found.eager_seq_len < found.checkpointing_seq_len < found.max_seq_len / 2
    assert main(["plan", str(tmp_path), "--memory", "64MiB"]) == 0
    assert f"{found.max_seq_len:,}" in capsys.readouterr().out.replace("_", ",")
