"""Bad inputs, and what each says: the model's own error, the argument, and what was expected."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from e2e_check import step
from e2e_models import VOCAB, build, plain, sample
from torch import nn

import streambp_fx
from streambp_fx.models.arguments import signature_of

IDS = plain(2, 24)["input_ids"]
WIDTH = 32


def batch(**over: Any) -> dict[str, Any]:
    given = {"input_ids": IDS, "labels": IDS, **over}
    return {n: v for n, v in given.items() if v is not None}


@dataclass(frozen=True)
class Bad:
    """An input that the model itself refuses.

    Attributes:
        batch: the arguments.
        note: what the note on the model's error says.
    """

    batch: dict[str, Any]
    note: str


LIKE = "expected (batch, tokens) = (2, 24), as input_ids has"
EMBEDS = torch.zeros(2, 24, WIDTH, dtype=torch.float64)
REFUSED = {
    "labels too short": Bad(batch(labels=IDS[:, :9]), f"labels is int64 (2, 9); {LIKE}"),
    "labels too long": Bad(batch(labels=torch.cat([IDS, IDS], 1)), f"labels is int64 (2, 48); {LIKE}"),
    "labels of fewer sequences": Bad(batch(labels=IDS[:1]), f"labels is int64 (1, 24); {LIKE}"),
    "labels of one dim": Bad(batch(labels=IDS[0]), f"labels is int64 (24,); {LIKE}"),
    "labels of float": Bad(batch(labels=IDS.float()), "labels is float32 (2, 24); expected token ids, int64"),
    "labels of int32": Bad(batch(labels=IDS.int()), "labels is int32 (2, 24); expected token ids, int64"),
    "labels as a list": Bad(batch(labels=IDS.tolist()), "labels is of type list; expected a tensor, int64"),
    "a mask too short": Bad(
        batch(attention_mask=torch.ones(2, 9).long().tril()), f"attention_mask is int64 (2, 9); {LIKE}"
    ),
    "a mask that is a word": Bad(batch(attention_mask="causal"), "attention_mask is of type str; expected"),
    "a mask as a list": Bad(
        batch(attention_mask=[[1] * 24] * 2), "attention_mask is of type list; expected a tensor"
    ),
    "ids of float": Bad(
        batch(input_ids=IDS.float()), "input_ids is float32 (2, 24); expected token ids, int64 or int32"
    ),
    "ids of int16": Bad(batch(input_ids=IDS.short()), "input_ids is int16 (2, 24); expected token ids"),
    "ids of bool": Bad(batch(input_ids=IDS > 3), "input_ids is bool (2, 24); expected token ids"),
    "ids as a list": Bad(batch(input_ids=IDS.tolist()), "input_ids is of type list; expected a tensor"),
    "ids of numpy": Bad(batch(input_ids=IDS.numpy()), "input_ids is of type ndarray; expected a tensor"),
    "text": Bad(batch(input_ids="w1 w2"), "input_ids is of type str; expected a tensor"),
    "what a tokenizer returns": Bad(
        batch(input_ids={"input_ids": IDS}), "input_ids is of type dict; expected a tensor"
    ),
    "ids of one dim": Bad(
        batch(input_ids=IDS[0], labels=IDS[0]), "input_ids is int64 (24,); expected (batch, tokens)"
    ),
    "one id": Bad(batch(input_ids=IDS[0, 0]), "input_ids is int64 (); expected (batch, tokens)"),
    "no input": Bad({}, "there are no tokens; expected input_ids or inputs_embeds"),
    "labels alone": Bad({"labels": IDS}, "there are no tokens; expected input_ids or inputs_embeds"),
    "ids and embeddings": Bad(
        batch(inputs_embeds=EMBEDS), "both input_ids and inputs_embeds are given; expected one of them"
    ),
    "embeddings of two dims": Bad(
        batch(input_ids=None, inputs_embeds=EMBEDS[0]), "inputs_embeds is float64 (24, 32); expected (batch,"
    ),
    "embeddings of another width": Bad(
        batch(input_ids=None, inputs_embeds=EMBEDS[..., :9]),
        "inputs_embeds is float64 (2, 24, 9); expected a hidden size of 32",
    ),
    "positions too short": Bad(
        batch(position_ids=torch.arange(9)[None]),
        "position_ids is int64 (1, 9); expected as many tokens as input_ids has: 24",
    ),
}


MASK = torch.ones(2, 1, 24, 9).bool()
# Such as another model might take: what was expected is said when the model has refused it.
REFUSED_LATER = {
    "a mask of other columns": Bad(
        batch(attention_mask=MASK),
        "attention_mask is bool (2, 1, 24, 9); expected a row and a column",
    ),
    "a mask of other heads": Bad(
        batch(attention_mask=torch.zeros(2, 3, 24, 24)),
        "attention_mask is float32 (2, 3, 24, 24); expected a row and a column for each",
    ),
    "a mask of numbers": Bad(
        batch(attention_mask=torch.zeros(2, 1, 24, 24).long()),
        "bool or of the dtype of the weights",
    ),
    "a mask of numpy": Bad(
        batch(attention_mask=torch.ones(2, 24).numpy()),
        "attention_mask is of type ndarray; expected",
    ),
    "positions of one dim": Bad(
        batch(position_ids=torch.arange(24)),
        "position_ids is int64 (24,); expected (batch, tokens)",
    ),
    "positions of three sequences": Bad(
        batch(position_ids=torch.arange(24).expand(3, 24)),
        "position_ids is int64 (3, 24); expected (batch,",
    ),
    "a count that is a word": Bad(
        batch(num_items_in_batch="3"), "num_items_in_batch is '3'; expected a whole number or a tensor"
    ),
    "logits to keep by a word": Bad(batch(logits_to_keep="all"), "logits_to_keep is 'all'; expected a whole"),
    "logits to keep beside labels": Bad(
        batch(logits_to_keep=5),
        "logits_to_keep is 5, and there are labels of 24 tokens; expected one of them",
    ),
    "ids of three dims": Bad(
        batch(input_ids=IDS[None], labels=IDS[None]),
        "input_ids is int64 (1, 2, 24); expected (batch, tokens)",
    ),
    "no tokens": Bad(
        batch(input_ids=IDS[:, :0], labels=IDS[:, :0]),
        "there are 2 sequences of 0 tokens; expected one",
    ),
    "no sequences": Bad(
        batch(input_ids=IDS[:0], labels=IDS[:0]), "there are 0 sequences of 24 tokens; expected one"
    ),
}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield


def small() -> Any:
    return build("llama", num_hidden_layers=1)


def raised(model: Any, given: dict[str, Any]) -> Exception:
    try:
        model(**given).loss.backward()
    except Exception as error:
        return error
    return AssertionError("nothing was raised")


def transformed(model: Any) -> Any:
    return streambp_fx.transform(model, chunk=16)


def transformed_strictly(model: Any) -> Any:
    return streambp_fx.transform(model, chunk=16, on_error="raise")


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="streambp", options={"chunk": 16})


def compiled_strictly(model: Any) -> Any:
    return torch.compile(
        model, backend="streambp", options={"chunk": 16, "on_error": "raise"}, fullgraph=True
    )


DOORS = (transformed, transformed_strictly, compiled, compiled_strictly)


@pytest.mark.parametrize("door", sample(DOORS, transformed))
def test_the_model_s_own_error_with_a_note(door: Callable[[Any], Any]) -> None:
    """Word for word, not chained to an error of a capture; and what was wrong in it, in a note."""
    eager, streamed = small(), door(small())
    wrong = []
    for name, bad in {**REFUSED, **REFUSED_LATER}.items():
        want, got = raised(eager, bad.batch), raised(streamed, bad.batch)
        noted = "\n".join(getattr(got, "__notes__", [])) or str(got)
        same = type(got) is type(want) and str(want) in str(got)
        if isinstance(want, AssertionError) or not same or bad.note not in noted:
            wrong.append(f"{name}: {type(got).__name__}: {got} ({noted})")
        chained = want.__context__ is not None  # transformers 5.0 tries some inputs a second time
        if got.__cause__ is not None or (got.__context__ is not None) is not chained:
            wrong.append(f"{name}: chained to {got.__cause__ or got.__context__!r}")
    assert not wrong, "\n".join(wrong)
    assert len(REFUSED) >= 25 and streambp_fx.status(streamed).streamed_steps == 0
    streamed(**batch()).loss.backward()
    assert streambp_fx.status(streamed).streamed_steps == 1


@pytest.mark.parametrize("door", [transformed, compiled])
@pytest.mark.parametrize("name", ["input_ids", "labels", "attention_mask", "position_ids"])
def test_inputs_without_values(door: Callable[[Any], Any], name: str) -> None:
    """Some ops read memory that a tensor on the meta device does not have: eager gives any loss."""
    with pytest.raises(streambp_fx.InputError, match=rf"{name} of Llama.* is on the meta device and has no"):
        door(small())(**batch(**{name: IDS.to("meta")}))


@pytest.mark.slow
def test_a_good_step_after_a_bad_one_is_streamed() -> None:
    model = streambp_fx.transform(small(), chunk=16, check="never")
    raised(model, REFUSED["labels too short"].batch)
    want = step(small(), plain(2, 24))[0]
    assert torch.allclose(step(model, plain(2, 24))[0], want, rtol=1e-12)
    raised(model, REFUSED["labels too short"].batch)
    step(model, plain(2, 30))
    assert streambp_fx.status(model).streamed_steps == 2


@pytest.mark.slow
def test_odd_inputs_that_the_model_takes() -> None:
    """A mask of ones is dropped before anybody looks at its length: the model's choice, and said once."""
    model = streambp_fx.transform(small(), chunk=16, check="never")
    odd = batch(attention_mask=torch.ones(2, 9).long())
    want = step(small(), odd)[0]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            assert step(model, odd)[0].equal(want)
    (said,) = (str(w.message) for w in caught if issubclass(w.category, streambp_fx.StreamBPWarning))
    assert said.startswith(f"attention_mask is int64 (2, 9); {LIKE}. The model takes it all the same")
    step(model, batch(attention_mask=torch.ones(2, 24).long()))
    found = streambp_fx.status(model)
    assert found.unstreamed_steps == 3 and found.streamed_steps == 1


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "streamed"), [(True, 2), (None, 0)])
def test_odd_inputs_that_the_model_takes_with_a_cache_alone(asked: bool | None, streamed: int) -> None:
    """A shorter mask is filled with zeros then. A step has a cache where the caller says so, and not else."""
    eager, short = small(), torch.ones(2, 9).long()
    eager.config.use_cache = True
    model = streambp_fx.transform(copy.deepcopy(eager), chunk=16, check="never")
    short[0, 5:] = 0
    odd = batch(attention_mask=short, use_cache=asked)
    with pytest.raises(RuntimeError):
        small()(**{**odd, "use_cache": False})
    want = step(eager, odd)[0]
    with pytest.warns(streambp_fx.StreamBPWarning, match="The model takes it all the same"):
        for _ in range(3):
            assert step(model, odd)[0].allclose(want, rtol=1e-12)
    found = streambp_fx.status(model)
    assert (found.unstreamed_steps, found.streamed_steps) == (3 - streamed, streamed)


RANGES = [(transformed, "labels"), (transformed, "input_ids"), (compiled, "labels"), (compiled, "input_ids")]


@pytest.mark.parametrize(("door", "name"), sample(RANGES, RANGES[0], RANGES[3]))
def test_values_out_of_range_are_an_error(door: Callable[[Any], Any], name: str) -> None:
    """Which values there are is not asked, which would wait for the device: kernels refuse them."""
    bad = IDS.clone()
    bad[1, 20] = VOCAB
    found = raised(door(small()), batch(**{name: bad}))
    assert isinstance(found, (IndexError, RuntimeError))
    noted = "\n".join(getattr(found, "__notes__", [])) or str(found)
    holds, up_to = f"{name} holds {VOCAB}; expected", f"{name} from {int(IDS.min())} to {VOCAB}"
    assert (holds if door is transformed else up_to) in noted


def test_a_dtype_that_weights_do_not_have() -> None:
    found = raised(transformed(small().float()), batch(input_ids=None, inputs_embeds=EMBEDS))
    noted = "\n".join(getattr(found, "__notes__", [])) or str(found)
    assert "inputs_embeds is float64 (2, 24, 32); expected float32, as the weights are" in noted


class Own(nn.Module):
    """A model with an interface of its own, whose labels are one for each sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, 3)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        return nn.functional.cross_entropy(self.head(self.table(input_ids).mean(1)), labels)


def test_other_interfaces_are_not_judged() -> None:
    model = streambp_fx.transform(Own())
    with pytest.raises(ValueError, match="batch_size") as caught:
        model(IDS, labels=torch.zeros(3, dtype=torch.long))
    assert caught.value.__context__ is None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model(IDS, labels=torch.zeros(2, dtype=torch.long)).backward()
    assert not [w for w in said if "expected" in str(w.message)]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (batch(labels=IDS[:, :9]), "labels is int64 (2, 9); expected (batch, tokens) = (2, 24)"),
        (batch(num_items_in_batch="3"), "num_items_in_batch is '3'; expected a whole number"),
        ({}, "there are no tokens; expected input_ids or inputs_embeds"),
        (None, 'batch must be a dictionary of the arguments of the model\'s forward, such as {"input_ids":'),
    ],
)
def test_batches_that_are_traced(given: Any, words: str) -> None:
    """Nothing is run, so it is not the model that says what is wrong."""
    with pytest.raises(streambp_fx.InputError, match=re.escape(words)):
        streambp_fx.trace(small(), given)


def test_what_is_no_module() -> None:
    for function in (streambp_fx.schedule, streambp_fx.restore, streambp_fx.status):
        with pytest.raises(TypeError, match=rf"{function.__name__} needs a torch.nn.Module, not int"):
            function(3)  # type: ignore[operator]
    with pytest.raises(streambp_fx.CaptureError, match="explain needs a torch"):
        streambp_fx.explain(3, 64)  # type: ignore[arg-type]


def test_weights_without_values() -> None:
    with torch.device("meta"):
        model = streambp_fx.transform(small().__class__(small().config).train())
    with pytest.raises(
        streambp_fx.InputError, match=r"weights of .* are on the meta device.*from_pretrained"
    ):
        model(**batch())


@pytest.mark.slow
def test_fewer_positions_than_tokens() -> None:
    from transformers import BertConfig, BertLMHeadModel

    config = BertConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    config.max_position_embeddings = 64
    with torch.device("meta"):
        model = BertLMHeadModel(config)
    assert streambp_fx.plan(model, 64).seq_len == 64
    with pytest.raises(streambp_fx.CaptureError, match=r"BertLMHeadModel has 64 positions, .* on 100 tokens"):
        streambp_fx.explain(model, 100)


@pytest.mark.parametrize("options", [{"chunk": 0}, {"chnk": 1}, {"memory": "much"}, {"seq_dim": {"x": "1"}}])
def test_options_say_the_same_through_both_doors(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError) as first:
        streambp_fx.transform(small(), **options)
    with pytest.raises(ValueError) as second:
        torch.compile(small(), backend="streambp", options=options)(**batch())
    assert str(second.value) == str(first.value) and second.value.__cause__ is None


def test_a_sequence_dim_that_is_not_there() -> None:
    words = r"seq_dim\['input_ids'\] is 5, but the input has the shape \(2, 24\)"
    with pytest.raises(ValueError, match=words):
        streambp_fx.transform(small(), seq_dim={"input_ids": 5})(**batch())


def test_options_that_are_no_dictionary() -> None:
    with pytest.raises(ValueError, match=r'options must be a dictionary such as \{"chunk": 2000\}'):
        torch.compile(small(), backend="streambp", options="chunk")(**batch())  # type: ignore[call-overload]


@pytest.mark.parametrize("door", sample([transformed, compiled], compiled))
def test_a_misspelt_argument_leaves_nothing_behind(door: Callable[[Any], Any]) -> None:
    model = build("llama")
    call = door(model)
    with pytest.raises(ValueError, match="input_ids or inputs_embeds") as refusal:
        call(input_id=IDS, labels=IDS)
    noted = "\n".join(getattr(refusal.value, "__notes__", [])) or str(refusal.value)
    assert "input_id is no argument of LlamaForCausalLM.forward. Did you mean 'input_ids'?" in noted
    call(**batch()).loss.backward()
    found = streambp_fx.status(model)
    assert found.streamed and found.unstreamed_steps == 0
    assert len(streambp_fx.schedule(model).segments) == 4


@pytest.mark.slow
def test_a_cache_that_is_stored_is_said_once() -> None:
    """`torch.compile` returns what the model returns, and transformers make a cache by default."""
    model = build("llama")
    model.config.use_cache = True
    call = compiled(model)
    with pytest.warns(streambp_fx.StreamBPWarning, match="returns a cache for generation.*use_cache = False"):
        call(**plain(2, 37)).loss.backward()
    stored = streambp_fx.schedule(model).stored_bytes_per_row()
    with warnings.catch_warnings():
        warnings.simplefilter("error", streambp_fx.StreamBPWarning)
        call(**plain(2, 41), use_cache=False).loss.backward()
    assert stored > 2 * streambp_fx.schedule(model).stored_bytes_per_row()


def test_a_forward_that_passes_everything_on() -> None:
    class Own(type(build("llama"))):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    model = Own(build("llama").config)
    assert "input_ids" in signature_of(model, model.forward).parameters
    streambp_fx.transform(model, chunk=8)
    model(**plain(2, 37)).loss.backward()
    assert streambp_fx.status(model).streamed
