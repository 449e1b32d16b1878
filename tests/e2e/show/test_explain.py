"""The schedule of a step that is not run."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from e2e_models import HIDDEN, build, plain, sample
from torch import Tensor

import streambp_fx
from streambp_fx.passes.graph.facts import Reach


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def test_sizes_and_reaches() -> None:
    """llama: hidden size 32, two key-value heads of 8, float64."""
    schedule = streambp_fx.explain(build("llama"), seq_len=1000, batch_size=3, chunk=300, loss_chunk=64)
    embedding, first, second, head = schedule.segments
    assert [schedule.chunks(s) for s in schedule.segments] == [1, 4, 4, 16]
    hidden = 3 * HIDDEN * 8
    assert schedule.stored_bytes_per_row() == 2 * hidden, "what goes into the second layer and the head"
    assert "not stored but computed again: what segment 0 gives" in str(schedule)
    assert schedule.state_bytes_per_row(first) == 3 * 2 * 2 * 8 * 8, "keys and values"
    assert schedule.state_bytes_per_row(head) == schedule.state_bytes_per_row(embedding) == 0
    assert first.signature == second.signature and first.reach is Reach.CAUSAL
    assert schedule.sweeps == 1 and schedule.seq_len == 1000


@pytest.mark.parametrize("every", sample([1, 2]))
def test_what_the_model_returns_is_not_computed_again(every: int) -> None:
    """The rows of an embedding that the caller is given are there: nobody makes them again."""
    model = build("llama")

    @torch.compile(backend="streambp", options={"chunk": 16, "loss_chunk": 8, "every": every})
    def call(input_ids: Tensor, labels: Tensor) -> Any:
        rows = model.model.embed_tokens(input_ids)
        return model(inputs_embeds=rows, labels=labels, use_cache=False).loss, rows

    batch = plain(3, 67)
    call(batch["input_ids"], batch["labels"])[0].backward()
    schedule = streambp_fx.schedule(model)
    assert schedule is not None
    again = "not stored but computed again: what segment 1 gives" in str(schedule)
    assert again == ("run again" in str(schedule.program)) == (every == 2)
    assert "segment 0 gives" not in str(schedule)
    assert schedule.stored_bytes_per_row() == 3 * HIDDEN * 8 * (2 if again else 3), "what goes into segments"


def test_one_screen() -> None:
    text = str(streambp_fx.explain(build("llama", num_hidden_layers=5), seq_len=1000, chunk=300))
    lines = text.splitlines()
    assert lines[0] == "Schedule of 7 segments for 1000 tokens, chunk 300, loss chunk 256 or more"
    assert lines[3].split()[:4] == ["1-5", "layer", "50", "4"] and "causal" in lines[3]
    assert "1.3 KiB a row of the batch, 1.2 MiB in all" in text and "1 sweep" in text
    assert len(lines) <= 12 and all(len(line) < 110 for line in lines)


@pytest.mark.slow
def test_weights_need_not_exist() -> None:
    model = build("gemma2").to("meta")
    schedule = streambp_fx.explain(model, seq_len=100_000, chunk=2000)
    assert [s.reach for s in schedule.segments[1:3]] == [Reach.WINDOW, Reach.CAUSAL]
    assert "window of 16 rows" in str(schedule) and "100000 tokens" in str(schedule)


@pytest.mark.slow
def test_layers_that_take_turns_are_shown_once() -> None:
    kinds = (["sliding_attention"] * 3 + ["full_attention"]) * 4 + ["sliding_attention"] * 2
    model = build("gemma3_text", num_hidden_layers=len(kinds), layer_types=kinds).to("meta")
    text = str(streambp_fx.explain(model, seq_len=100_000, chunk=2000))
    lines = text.splitlines()
    first = next(k for k, line in enumerate(lines) if "1-16     4 times these 4:" in line)
    assert lines[first + 1].split()[0] == "1-3" and "a window of" in lines[first + 1]
    assert lines[first + 2].split()[0] == "4" and "all rows up to its own" in lines[first + 2]
    assert lines[first + 3].split()[0] == "17-18" and "a window of" in lines[first + 3]
    assert len(lines) < 20 and all(len(line) < 110 for line in lines), text


@pytest.mark.parametrize("before", sample(["plain", "transformed", "evaluating"]))
def test_the_model_is_left_as_it_was(before: str) -> None:
    model = build("llama")
    if before == "transformed":
        streambp_fx.transform(model, chunk=16, loss_chunk=8)
    model.model.layers[0].eval()
    model.train(before != "evaluating")
    forward, modes = vars(model).get("forward"), [m.training for m in model.modules()]
    weights = copy.deepcopy(model.state_dict())
    streambp_fx.explain(model, seq_len=64)
    assert vars(model).get("forward") is forward and [m.training for m in model.modules()] == modes
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    if before == "transformed":
        model(**plain(2, 37)).loss.backward()
        assert streambp_fx.schedule(model).options.chunk == 16


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"seq_len": 1}, "seq_len must be an int of at least 2, not 1"),
        ({"seq_len": "4k"}, "seq_len must be an int"),
        ({"seq_len": 8, "batch_size": 0}, "batch_size must be an int of at least 1, not 0"),
        ({"seq_len": 8, "chnk": 1}, "unknown option 'chnk'"),
    ],
)
def test_wrong_sizes(sizes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        streambp_fx.explain(build("llama"), **sizes)


def test_what_is_not_chunked_is_said() -> None:
    model = build("llama")
    inner = model.model.layers[1].mlp

    class Flip(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).flip(1)  # mixes rows

    model.model.layers[1].mlp = Flip()
    with pytest.warns(streambp_fx.StreamBPWarning):
        text = str(streambp_fx.explain(model, seq_len=64))
    assert "runs unchunked" in text and "flip" in text and "test_explain.py" in text
    assert all(len(line) < 110 for line in text.splitlines()), text


@pytest.mark.parametrize("family", sample(["gpt2", "opt"], "gpt2"))
def test_more_tokens_than_learned_positions(family: str) -> None:
    """Past the table nothing can be looked up; positions that are computed have no end."""
    model = build(family)
    most = model.config.max_position_embeddings
    with pytest.raises(
        streambp_fx.CaptureError, match=f"has {most} positions, and cannot be run on {most + 1}"
    ):
        streambp_fx.explain(model, most + 1)
    with pytest.raises(streambp_fx.PlanError, match="positions, which are learned"):
        streambp_fx.plan(model, most + 1)
    found = streambp_fx.plan(model, memory="8GiB")
    assert found.max_seq_len == found.seq_len == most, "memory would be there for more"
    rotary = build("llama")
    streambp_fx.explain(rotary, rotary.config.max_position_embeddings + 1)


@pytest.mark.slow
def test_a_classifier_of_sequences() -> None:
    """One label a sequence, and not one a token."""
    config = build("llama").config
    config.pad_token_id = 0
    model = transformers.LlamaForSequenceClassification(config)
    schedule = streambp_fx.explain(model, 40, chunk=8)
    assert sum(s.chunked for s in schedule.segments) >= config.num_hidden_layers
    assert streambp_fx.plan(model, 4000).fits
