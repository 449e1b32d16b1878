"""The call that the user makes means what it means unstreamed: arguments, situations around the step."""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import inspect
import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from adversaries.situations import plain
from e2e_adversary import DOORS, Record, compare, our_warnings, streamed, tokens
from e2e_check import assert_streamed
from e2e_models import build, sample
from e2e_subject import VOCAB, WIDTH, Subject, token_loss
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, BertForTokenClassification
from transformers.modeling_outputs import CausalLMOutput

import streambp_fx
from streambp_fx.dynamo import each_frame

OPTIONS = {"chunk": 8, "loss_chunk": 5, "check": "never", "on_error": "raise"}
Scenario = Callable[[Any, Callable[..., Any], Record], None]


class Mode(enum.Enum):
    LINEAR, SQUARE = 1, 2


class Model(Subject):
    """Its defaults are not None, and some of its arguments are its own business."""

    def loss_of(self, ids: Tensor, labels: Tensor, scale: Any = 1.0) -> Tensor:
        x = self.embed(ids)
        x = x + self.attend(self.norm(x)) * scale
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    def forward(
        self,
        input_ids: Tensor,
        /,
        labels: Any = "ids",
        *rest: Any,
        scale: Any = 0.5,
        use_cache: bool = True,
        **more: Any,
    ) -> Any:
        labels = input_ids if isinstance(labels, str) else input_ids.flip(1) if labels is None else labels
        scale = 2.0 if scale is None else scale
        loss = self.loss_of(input_ids, labels, scale) * sum(rest, 1.0) * (2 if use_cache else 1)
        if "again" in more:
            loss = loss * (3 if more["again"] is None else 5)
        return loss.square() if more.get("mode") is Mode.SQUARE else loss * more.get("weight", 1)


class OtherNames(Model):
    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Any:  # type: ignore[override]
        return self.loss_of(tokens, tokens if targets is None else targets)


class Scores(Subject):
    """A classifier: its logits are no wider than anything, and labels have no sequence."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = self.embed(input_ids)
        x = x + self.attend(self.norm(x))
        logits = self.lin(x).mean(1)[:, : labels.shape[1]]
        return {"logits": logits, "loss": F.binary_cross_entropy_with_logits(logits, labels)}


def steps(*calls: Callable[[Any, Tensor], Any]) -> Scenario:
    def run(m: Any, call: Any, record: Record) -> None:
        for one in calls:
            record.step(m, lambda ids, one=one: one(call, ids), tokens(2, 33))

    return run


CALLS: dict[str, Scenario] = {
    "none and defaults": steps(
        lambda f, ids: f(ids),
        lambda f, ids: f(ids, None),
        lambda f, ids: f(ids, ids, scale=None),
        lambda f, ids: f(ids, ids, use_cache=False),
    ),
    "variadic": steps(lambda f, ids: f(ids, ids, 0.5), lambda f, ids: f(ids, ids, 0.5, 2)),
    "extra keywords": steps(
        lambda f, ids: f(ids, again=None),
        lambda f, ids: f(ids, again=1),
        lambda f, ids: f(ids, mode=Mode.SQUARE),
        lambda f, ids: f(ids, weight=0.1),
        lambda f, ids: f(ids, weight=3),
    ),
    "the same tensor twice": steps(
        lambda f, ids: f(ids, ids),
        lambda f, ids: f(ids, ids.clone()),
        lambda f, ids: f(ids[:, 1:], ids[:, :-1]),
    ),
}


def frozen(m: Any, call: Any, record: Record) -> None:
    record.step(m, call, tokens(2, 33))
    m.lin.requires_grad_(False)
    record.step(m, call, tokens(2, 33))
    m.requires_grad_(False)
    record("nothing to train", call(tokens(2, 33)))
    m.head.requires_grad_(True)
    record.step(m, call, tokens(2, 20))


def modes(m: Any, call: Any, record: Record) -> None:
    with torch.no_grad():
        record("without grad", call(tokens(2, 33)))
    record.step(m, call, tokens(2, 33))
    m.eval()
    record.step(m, call, tokens(2, 33))
    m.train()
    with torch.inference_mode():
        record("inference", float(call(tokens(2, 12))))
    record.step(m, call, tokens(2, 12))


def replaced(m: Any, call: Any, record: Record) -> None:
    record.step(m, call, tokens(2, 33))
    m.lin.weight = nn.Parameter(m.lin.weight.detach() * 2)
    record.step(m, call, tokens(2, 33))
    m.lin.weight.data = m.lin.weight.data.T
    record.step(m, call, tokens(2, 20))
    m.extra = nn.Parameter(torch.full((WIDTH,), 0.3, dtype=torch.float64))
    m.block = lambda m, x, ids: x + m.lin(x) * m.extra
    record.step(m, call, tokens(2, 20))


def checkpointed(m: Any, call: Any, record: Record) -> None:
    for reentrant in (False, True, False):
        m.zero_grad()
        weight = torch.ones((), dtype=torch.float64, requires_grad=True)
        loss = checkpoint(lambda w, ids: call(ids) * w, weight, tokens(2, 33), use_reentrant=reentrant)
        loss.backward()
        record("weight", weight.grad)
        record.state(m)


def copied(m: Any, call: Any, record: Record) -> None:
    record.step(m, call, tokens(2, 33))
    other = copy.deepcopy(m)
    other.lin.weight.data.mul_(2)
    record.step(other, other, tokens(2, 33))
    other.load_state_dict(m.state_dict())
    record.step(other, other, tokens(2, 20))
    record.step(m, call, tokens(2, 20))


SITUATIONS = {f.__name__: f for f in (frozen, modes, replaced, checkpointed, copied)}


def laid_out(where: str, make: Callable[[Subject], Tensor]) -> Callable[[], Subject]:
    def model() -> Subject:
        made = Subject(plain)
        part, _, name = where.rpartition(".")
        setattr(made.get_submodule(part), name, nn.Parameter(make(made)))
        return made

    return model


PARAMETERS = {
    "transposed": laid_out("lin.weight", lambda m: torch.randn(WIDTH, WIDTH).double().T),
    "a transposed head": laid_out("head.weight", lambda m: torch.randn(WIDTH, VOCAB).double().T),
    "expanded": laid_out("norm.weight", lambda m: torch.ones(1).double().expand(WIDTH)),
    "every second": laid_out("q.weight", lambda m: torch.randn(24, 24).double()[::2, ::2]),
    "tied by a view": laid_out("k.weight", lambda m: m.q.weight.detach().T),
}


def exact(make: Callable[[], Any], scenario: Scenario, door: str, **options: Any) -> tuple[Any, list[str]]:
    """The scenario on an eager and a streamed model; the streamed one and what it warned of."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = make()
    model, want, got = copy.deepcopy(eager), Record(), Record()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scenario(eager, eager, want)
    with our_warnings() as warned:
        scenario(model, streamed(model, door, {**OPTIONS, **options}), got)
    compare(got, want)
    return model, warned


def every(names: Any, *often: tuple[str, str]) -> list[Any]:
    return sample([(n, d) for n in names for d in DOORS], *often)


@pytest.mark.parametrize(("name", "door"), every(CALLS, ("none and defaults", "transform")))
def test_calls(name: str, door: str) -> None:
    model, warned = exact(Model, CALLS[name], door)
    assert_streamed(model)
    assert not warned


@pytest.mark.parametrize(("name", "door"), every(SITUATIONS, ("checkpointed", "compile")))
def test_situations(name: str, door: str) -> None:
    model, warned = exact(lambda: Subject(plain), SITUATIONS[name], door)
    assert_streamed(model)
    if (name, door) == ("modes", "transform"):  # of which one is that of an evaluation
        assert len(warned) == 1 and "is in evaluation mode" in str(warned[0])
    else:
        assert not warned


@pytest.mark.parametrize(("name", "door"), every(PARAMETERS, ("tied by a view", "compile")))
def test_parameters_in_any_layout(name: str, door: str) -> None:
    model, warned = exact(PARAMETERS[name], steps(lambda f, ids: f(ids)), door)
    assert_streamed(model)
    assert not warned


def test_tokens_of_another_name() -> None:
    run = steps(lambda f, ids: f(ids), lambda f, ids: f(targets=ids.flip(1), tokens=ids))
    model, warned = exact(OtherNames, run, "transform", seq_dim={"tokens": 1})
    assert_streamed(model)
    assert not warned
    with pytest.raises(streambp_fx.CaptureError, match="seq_dim"):
        streambp_fx.transform(OtherNames())


def test_scores_of_a_classifier_stay() -> None:
    labels = torch.rand(2, 4).double()
    _, warned = exact(Scores, steps(lambda f, ids: f(ids, labels)), "transform")
    assert all("unchunked" in text for text in warned)


# ---- what is returned


class Labelled(Subject):
    """Logits as wide as the table of its tokens, in an output of `kind`."""

    def __init__(self, kind: Callable[..., Any]) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = self.embed(input_ids)
        logits = self.head(x + self.attend(self.norm(x)))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return self.kind(loss, logits)


@dataclasses.dataclass
class Halved:
    loss: Tensor
    logits: Any
    halves: int = dataclasses.field(default=1, init=False)

    def __post_init__(self) -> None:
        self.loss = self.loss / 2


@dataclasses.dataclass(frozen=True)
class Frozen:
    loss: Tensor
    logits: Any


class Renamed(dict):
    def __init__(self, loss: Tensor, scores: Tensor) -> None:
        super().__init__(loss=loss, logits=scores)


class Plain:
    def __init__(self, loss: Tensor, logits: Tensor) -> None:
        self.loss, self.logits = loss, logits


class ReadOnly:
    def __init__(self, loss: Tensor, scores: Tensor) -> None:
        self.loss, self.scores = loss, scores

    @property
    def logits(self) -> Tensor:
        return self.scores


class Named(NamedTuple):
    loss: Tensor
    logits: Any


OUTPUTS: dict[str, Callable[..., Any]] = {
    "a dictionary": lambda loss, logits: {"loss": loss, "logits": logits},
    "of transformers": lambda loss, logits: CausalLMOutput(loss=loss, logits=logits),
    "a dictionary with a default": lambda loss, logits: defaultdict(list, loss=loss, logits=logits),
    "a dictionary of its own": Renamed,
    "an object": Plain,
    "a tuple": lambda loss, logits: (loss, logits),
    "a named tuple": Named,
    "made by its constructor": Halved,
    "frozen": Frozen,
    "read only": ReadOnly,
}


def part(output: Any, name: str) -> Any:
    if type(output) is tuple:
        return output[name == "logits"]
    return getattr(output, name) if hasattr(output, name) else output[name]


@pytest.mark.parametrize("kind", sample(OUTPUTS, *list(OUTPUTS)[::3]))
def test_outputs_without_logits_are_what_they_are(kind: str) -> None:
    eager = Labelled(OUTPUTS[kind])
    model = streambp_fx.transform(copy.deepcopy(eager), **OPTIONS)
    torch._dynamo.reset()
    for length in (33, 20):
        want, got = (m(tokens(2, length), tokens(2, length)) for m in (eager, model))
        assert type(got) is type(want)
        torch.testing.assert_close(part(got, "loss"), part(want, "loss"))
        if kind == "read only":
            torch.testing.assert_close(part(got, "logits") + 0, part(want, "logits"))
        else:
            assert part(got, "logits") is None
        for name in ("halves", "default_factory"):
            assert getattr(got, name, None) == getattr(want, name, None)
        if isinstance(want, dict):
            assert set(got) | {"logits"} == set(want)
    assert_streamed(model)


@pytest.mark.parametrize("labels", sample([2, 5, 40], 2))
def test_scores_of_tokens_stay(labels: int) -> None:
    """Also where there are as many as types of tokens, and where they are wider than the model."""
    config = BertConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_labels=labels,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch._dynamo.reset()
    eager = BertForTokenClassification(config).double().train()
    eager.dropout.p = 0.0
    model = streambp_fx.transform(copy.deepcopy(eager), **OPTIONS)
    ids = tokens(2, 33)
    want, got = (m(input_ids=ids, labels=ids % labels) for m in (eager, model))
    torch.testing.assert_close(got.logits + 0, want.logits)
    (want.loss + want.logits.square().mean()).backward()
    (got.loss + got.logits.square().mean()).backward()
    torch.testing.assert_close(model.classifier.weight.grad, eager.classifier.weight.grad)


# ---- a model of transformers in another


class Around(nn.Module):
    """Arguments that are called as in transformers, and mean something else."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = build("llama", num_hidden_layers=1).double()
        self.config = self.lm.config

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        use_cache: Any = None,
        num_items_in_batch: int = 1,
        **more: Any,
    ) -> Any:
        hidden = self.lm.model(input_ids).last_hidden_state
        loss = F.cross_entropy(self.lm.lm_head(hidden).flatten(0, 1), labels.flatten())
        weights = torch.ones(num_items_in_batch) if num_items_in_batch > 2 else torch.ones(2)
        return loss * (3 if use_cache is None else 1) * weights.sum() * (1 + len(more))


@pytest.mark.slow
def test_arguments_of_a_model_around_one_of_transformers() -> None:
    run = steps(
        lambda f, ids: f(ids, ids),
        lambda f, ids: f(ids, ids, num_items_in_batch=5),
        lambda f, ids: f(ids, ids, use_cache=False),
    )
    exact(Around, run, "transform")


# ---- numbers


def test_whole_numbers_of_numpy() -> None:
    class Last(Subject):
        def forward(self, input_ids: Tensor, last: Any) -> Any:
            x = self.embed(input_ids)
            x = x + self.attend(self.norm(x))
            return F.cross_entropy(self.head(x)[:, -last:].flatten(0, 1), input_ids[:, -last:].flatten())

    counts = (numpy.int64(7), numpy.int32(5), 7)
    exact(Last, steps(*(lambda f, ids, n=n: f(ids, n) for n in counts)), "transform")


FLOATS: dict[str, Callable[[Tensor, Tensor, float], Any]] = {
    "of a value for each token": lambda each, ids, w: (each * w).mean(),
    "of a mean": lambda each, ids, w: each.mean() * w + (1 - w) * each.sum() / (w + 1),
    "of whole numbers": lambda each, ids, w: (each * (ids * w)).mean(),
    "of a mask": lambda each, ids, w: {"loss": (each * ((ids != 4) * w)).mean(), "mask": (ids != 4) * w},
    "powers": lambda each, ids, w: each.mean() * w * w + sum([w, w * 2, 1]) * each.square().mean(),
    "a factor of a sum": lambda each, ids, w: torch.add(each, each.square(), alpha=w).mean(),
    "in place": lambda each, ids, w: each.mean().mul_(w) + (each * 2).mul_(w).sum(),
}


@pytest.mark.parametrize("how", sample(FLOATS, "in place"))
def test_a_float_that_changes_is_still_a_number(how: str) -> None:
    """From the second value on it comes as a tensor, which must not change any dtype."""

    class Weighted(Subject):
        def forward(self, input_ids: Tensor, weight: float) -> Any:
            x = self.embed(input_ids)
            logits = self.head(x + self.attend(self.norm(x)))
            each = F.cross_entropy(logits.mT, input_ids, reduction="none")
            return FLOATS[how](each, input_ids, weight)

    torch._dynamo.reset()
    eager = Weighted().float()
    model = copy.deepcopy(eager)
    call = torch.compile(model, backend="streambp", options=OPTIONS)
    for weight in (0.5, 0.3, 0.1):
        want, got = eager(tokens(2, 33), weight), call(tokens(2, 33), weight)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        for m, output in ((eager, want), (model, got)):
            m.zero_grad()
            (output["loss"] if isinstance(output, dict) else output).backward()
        torch.testing.assert_close(model.q.weight.grad, eager.q.weight.grad, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(model.head.weight.grad, eager.head.weight.grad, rtol=1e-4, atol=1e-5)
    assert_streamed(model)


@pytest.mark.parametrize("what", sample(["argument", "attribute"], "argument"))
def test_more_values_than_graphs_are_kept_for(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(each_frame, "RECOMPILE_LIMIT", 2)

    class Weighted(Subject):
        weight = 1.0

        def forward(self, input_ids: Tensor, weight: float = 1.0) -> Any:
            x = self.embed(input_ids)
            return token_loss(self, x + self.attend(self.norm(x)), input_ids) * weight * self.weight

    def run(m: Any, call: Any, record: Record) -> None:
        for weight in (0.1, 0.2, 0.3, 0.4, 0.1):
            m.weight = weight if what == "attribute" else 1.0
            record.step(m, call, tokens(2, 33), weight if what == "argument" else 1.0)

    _, warned = exact(Weighted, run, "transform")
    assert len(warned) == 2 and all("2 graphs" in text and "unstreamed" in text for text in warned)


# ---- copies and wrappers


def replica(model: Any) -> Any:
    made = model._replicate_for_data_parallel()
    made._parameters = dict(model._parameters)
    return made


@pytest.mark.parametrize("hooked", sample([False, True], True))
@pytest.mark.parametrize("copied", sample([copy.copy, replica], replica))
def test_a_shallow_copy_runs_its_own_forward(copied: Callable[[Any], Any], hooked: bool) -> None:
    def run(m: Any, call: Any, record: Record) -> None:
        record.step(m, call, tokens(2, 33))
        other = copied(m)
        other._modules = {**m._modules, "lin": m.lin2}
        if hooked:
            other._forward_pre_hooks = type(m._forward_pre_hooks)({0: lambda module, args: None})
        record.step(other, other, tokens(2, 33))
        with torch.no_grad():
            record("without gradients", other(tokens(2, 33)))
        if call is m and hasattr(m.forward, "options"):
            streambp_fx.transform(other, **OPTIONS)
        record.step(other, other, tokens(2, 20))
        streambp_fx.restore(other)
        record.step(other, other, tokens(2, 20))
        record.step(m, call, tokens(2, 20))

    model, warned = exact(lambda: Subject(plain), run, "transform")
    assert_streamed(model)
    assert len(warned) == 1 and "shallow copy" in warned[0]


def test_a_shallow_copy_of_a_restored_model() -> None:
    def run(m: Any, call: Any, record: Record) -> None:
        other = copy.copy(m)
        other._modules = {**m._modules, "lin": m.lin2}
        streambp_fx.restore(m)
        record.step(other, other, tokens(2, 33))

    exact(lambda: Subject(plain), run, "transform")


def test_a_wrapper_that_binds_the_model() -> None:
    """It says that it wraps the function of the class, whose signature has the model as well."""

    class Wrapped(Subject):
        def __init__(self) -> None:
            super().__init__(plain)
            self.forward = functools.wraps(Subject.forward)(lambda *args: Subject.forward(self, *args) * 2)

    torch._dynamo.reset()
    eager, model = Wrapped(), streambp_fx.transform(Wrapped(), **OPTIONS)
    want, got = eager(tokens(2, 33)), model(tokens(2, 33))
    torch.testing.assert_close(got, want)
    assert_streamed(model)


def test_arguments_that_fit_no_signature_are_warned_of() -> None:
    class Wrapped(Subject):
        def __init__(self) -> None:
            super().__init__(plain)
            self.forward = lambda input_ids, extra=None: Subject.forward(self, input_ids)
            self.forward.__signature__ = inspect.Signature(
                [inspect.Parameter("input_ids", inspect.Parameter.KEYWORD_ONLY)]
            )

    model = streambp_fx.transform(Wrapped(), **OPTIONS)
    with pytest.warns(streambp_fx.StreamBPWarning, match="do not fit"):
        model(tokens(2, 33)).backward()


def test_arguments_that_do_not_fit_are_the_models_own_error() -> None:
    model = streambp_fx.transform(OtherNames(), seq_dim={"tokens": 1}, **OPTIONS)
    with pytest.raises(TypeError, match="unknown"):
        model(tokens(2, 33), unknown=1)
    model(tokens(2, 33)).backward()
    assert_streamed(model)
