"""What is refused, in words that help, and leaves the model as it was."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e_check import LOSS_CHUNK, step
from e2e_models import build, plain
from torch import nn
from transformers import DynamicCache, LlamaForCausalLM

import streambp_fx
from streambp_fx.options import Options

HERE = Path(__file__)


def line_of(marker: str) -> int:
    """The line of this file that ends in the comment `# marker`."""
    (line,) = (n for n, t in enumerate(HERE.read_text().splitlines(), 1) if t.endswith("# " + marker))
    return line


def assert_names_line(message: str, marker: str) -> None:
    pattern = rf"{HERE.name}\D{{1,12}}{line_of(marker)}\b"
    assert re.search(pattern, message), f"{pattern} is not in: {message}"


def insides(model: nn.Module) -> dict[str, dict[str, int]]:
    """Every attribute of every submodule, by identity, without the dictionaries of parameters."""
    return {
        n: {k: id(v) for k, v in vars(m).items() if not isinstance(v, (bool, int, float))}
        for n, m in model.named_modules()
    }


@pytest.mark.parametrize("chunk", [0, -3, 1.5, "big", None, True, float("nan"), [16], "16", ""])
def test_chunk_must_be_a_positive_int_or_auto(chunk: Any) -> None:
    model = build("llama")
    before = insides(model)
    with pytest.raises(ValueError, match=r"chunk") as refusal:
        streambp_fx.transform(model, chunk=chunk)
    assert repr(chunk) in str(refusal.value) and "auto" in str(refusal.value)
    assert insides(model) == before


@pytest.mark.parametrize("loss_chunk", [0, -1, 2.5, "small", True])
def test_loss_chunk_must_be_a_positive_int(loss_chunk: Any) -> None:
    with pytest.raises(ValueError, match=r"loss_chunk"):
        streambp_fx.transform(build("llama"), loss_chunk=loss_chunk)


@pytest.mark.parametrize("logits", ["all", True, None, 3])
def test_logits_must_be_drop_or_keep(logits: Any) -> None:
    with pytest.raises(ValueError, match=r"logits.*(drop|keep)"):
        streambp_fx.transform(build("llama"), logits=logits)


@pytest.mark.parametrize(
    ("wrong", "right"), [("chunk_size", "chunk"), ("chunks", "chunk"), ("loss_chunks", "loss_chunk")]
)
def test_unknown_option_names_the_nearest(wrong: str, right: str) -> None:
    model = build("llama")
    before = insides(model)
    with pytest.raises((TypeError, ValueError)) as refusal:
        streambp_fx.transform(model, **{wrong: 16})
    assert wrong in str(refusal.value)
    assert re.search(rf"(?<![\w]){right}(?![\w])", str(refusal.value)), str(refusal.value)
    assert insides(model) == before


@pytest.mark.slow
def test_good_options_pass() -> None:
    for options in ({"chunk": 1}, {"chunk": "auto"}, {"chunk": 10**9, "loss_chunk": 1}, {}):
        model = streambp_fx.transform(build("llama", num_hidden_layers=1), **options)
        assert model(**plain(2, 9)).logits is None
        streambp_fx.restore(model)


@pytest.mark.parametrize("chunk", [True, 16])
@pytest.mark.parametrize(
    "what", [nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), nn.TransformerEncoderLayer(8, 2)]
)
def test_not_a_causal_lm(what: nn.Module, chunk: Any) -> None:
    before = insides(what)
    error = ValueError if chunk is True else streambp_fx.CaptureError
    with pytest.raises(error):
        streambp_fx.transform(what, chunk=chunk)
    assert insides(what) == before


@pytest.mark.parametrize("what", [None, "llama", 3, torch.zeros(3), LlamaForCausalLM])
def test_not_a_model(what: Any) -> None:
    with pytest.raises(TypeError, match=r"needs a torch\.nn\.Module, not") as refusal:
        streambp_fx.transform(what, chunk=16)
    assert ("from_pretrained('llama')" in str(refusal.value)) is (what == "llama")


@pytest.mark.parametrize("given", [{"options": {"chunk": 16}}, {"verbos": True}])
def test_what_is_no_option_says_what_to_write(given: dict[str, Any]) -> None:
    words = r"keywords: transform\(model, chunk=2000\)" if "options" in given else "unknown option 'verbos'"
    with pytest.raises(ValueError, match=words):
        streambp_fx.transform(build("llama", num_hidden_layers=1), **given)
    with pytest.raises(ValueError, match="an argument of transform alone"):
        Options.parse({"verbose": True})


def test_not_a_causal_lm_says_so() -> None:
    with pytest.raises(streambp_fx.CaptureError, match=r"(?i)linear.*causal|causal.*linear"):
        streambp_fx.transform(nn.Linear(4, 4), chunk=16)


# -- what a streamed step does not give --------------------------------------------------------------------


def with_cache(model: Any) -> dict[str, Any]:
    return {"past_key_values": DynamicCache(config=model.config)}


def by_config(name: str) -> Any:
    def ask(model: Any) -> dict[str, Any]:
        setattr(model.config, name, True)
        return {}

    return ask


ASKED = {
    "output_hidden_states": lambda model: {"output_hidden_states": True},
    "output_attentions": lambda model: {"output_attentions": True},
    "past_key_values": with_cache,
    "output_hidden_states by the config": by_config("output_hidden_states"),
    "output_attentions by the config": by_config("output_attentions"),
}


@pytest.mark.parametrize("asked", ASKED)
def test_what_is_not_streamed_is_given_by_the_unstreamed_step(asked: str) -> None:
    """The same step, bit for bit, and one warning that names the argument."""
    eager, streamed = (build("llama", "eager") for _ in range(2))
    streambp_fx.transform(streamed, chunk=16, loss_chunk=LOSS_CHUNK)
    want_loss, want = step(eager, {**plain(2, 40), **ASKED[asked](eager)})
    with pytest.warns(streambp_fx.StreamBPWarning) as caught:
        got_loss, got = step(streamed, {**plain(2, 40), **ASKED[asked](streamed)})
    ours = [str(w.message) for w in caught if issubclass(w.category, streambp_fx.StreamBPWarning)]
    assert len(ours) == 1 and ours[0].startswith(asked.split()[0] + ": ")
    assert got_loss.equal(want_loss)
    assert all(got[name].equal(g) for name, g in want.items())
    assert streambp_fx.schedule(streamed) is None, "nothing was compiled"


# -- models that cannot be captured ----------------------------------------------------------------------


class Prints(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print(x.shape)  # prints
        return self.inner(x)


class Branches(Prints):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum().item() > 0:  # branches on data
            return self.inner(x)
        return -self.inner(x)


class Breaks(Prints):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()  # breaks the graph
        return self.inner(x)


BREAKS = {"prints": Prints, "branches on data": Branches, "breaks the graph": Breaks}


def broken(marker: str) -> Any:
    model = build("llama")
    model.model.layers[1].mlp = BREAKS[marker](model.model.layers[1].mlp)
    return model


@pytest.mark.parametrize("marker", BREAKS)
def test_a_graph_break_is_a_capture_error_with_the_line(marker: str) -> None:
    model = broken(marker)
    want = step(model, plain(2, 67))[0]
    before = insides(model)
    with pytest.raises(streambp_fx.CaptureError) as refusal:
        streambp_fx.transform(model, chunk=16, loss_chunk=LOSS_CHUNK, on_error="raise")
        model(**plain(2, 67))  # where capture waits for the first batch
    message = str(refusal.value)
    assert_names_line(message, marker)
    assert len(message) < 4000, "plain words, not a log"
    streambp_fx.restore(model)
    assert insides(model).keys() == before.keys()
    assert {n: set(a) for n, a in insides(model).items()} == {n: set(a) for n, a in before.items()}
    assert step(model, plain(2, 67))[0].equal(want)


def test_a_graph_break_runs_unstreamed_and_says_so() -> None:
    """Once: the next step is not captured again. Not checkpointed: the module is nobody's who was asked."""
    model = broken("branches on data")
    eager = copy.deepcopy(model)
    streambp_fx.transform(model, chunk=16, loss_chunk=LOSS_CHUNK)
    want_loss, want = step(eager, plain(2, 67))
    with pytest.warns(streambp_fx.StreamBPWarning, match=r"(?s)one graph.*branches on data.*unstreamed\.$"):
        loss, got = step(model, plain(2, 67))
    assert loss.equal(want_loss) and all(got[n].equal(want[n]) for n in want)
    assert step(model, plain(2, 67))[0].equal(want_loss)
    assert streambp_fx.schedule(model) is None


@pytest.mark.slow
def test_a_failed_capture_can_be_tried_again() -> None:
    """The user mends the model and trains on, without restoring anything."""
    model = broken("branches on data")
    with pytest.raises(streambp_fx.CaptureError):
        streambp_fx.transform(model, chunk=16, on_error="raise")(**plain(2, 67))
    model.model.layers[1].mlp = model.model.layers[1].mlp.inner
    streambp_fx.transform(model, chunk=16)
    assert model(**plain(2, 67)).logits is None


def test_an_error_of_the_model_is_not_hidden() -> None:
    """Labels of another length: an error, and the next good step works."""
    model = streambp_fx.transform(build("llama"), chunk=16)
    with pytest.raises(Exception, match=r"."):
        model(input_ids=plain(2, 67)["input_ids"], labels=plain(2, 60)["labels"])
    loss, got = step(model, plain(2, 67))
    assert loss.isfinite() and all(g is not None for g in got.values())


@pytest.mark.parametrize("bad", [97, pytest.param(-1, marks=pytest.mark.slow)])
def test_a_token_outside_the_vocabulary_is_an_error(bad: int) -> None:
    batch = plain(2, 67)
    batch["input_ids"][1, 40] = bad
    with pytest.raises((IndexError, RuntimeError)):
        build("llama")(**batch)
    with pytest.raises((IndexError, RuntimeError)):
        streambp_fx.transform(build("llama"), chunk=16)(**batch).loss.backward()


@pytest.mark.filterwarnings("ignore::streambp_fx.StreamBPWarning")
@pytest.mark.parametrize("shapes", [((3, 24),) * 3, ((2, 24, 24), (24,), (24,))])
def test_odd_masks_that_the_model_takes_are_taken_again(shapes: tuple[tuple[int, ...], ...]) -> None:
    """The first step runs as it is; a later one that cannot be captured does, too."""
    eager = build("llama")
    streamed = streambp_fx.transform(copy.deepcopy(eager), chunk=8, check="never")
    ids = torch.arange(48).view(2, 24) % 50
    for shape in shapes:
        batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones(shape).bool()}
        want, got = eager(**batch).loss, streamed(**batch).loss
        torch.testing.assert_close(got, want)
        got.backward()
