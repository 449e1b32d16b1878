"""The call that the user makes means what it means unstreamed: arguments, situations around the step."""

from __future__ import annotations

import copy
import enum
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from adversaries.situations import plain
from e2e_adversary import DOORS, Record, compare, our_warnings, streamed, tokens
from e2e_check import assert_streamed
from e2e_models import sample
from e2e_subject import VOCAB, WIDTH, Subject
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import streambp_fx

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


def test_arguments_that_do_not_fit_are_the_models_own_error() -> None:
    model = streambp_fx.transform(OtherNames(), seq_dim={"tokens": 1}, **OPTIONS)
    with pytest.raises(TypeError, match="unknown"):
        model(tokens(2, 33), unknown=1)
    model(tokens(2, 33)).backward()
    assert_streamed(model)
