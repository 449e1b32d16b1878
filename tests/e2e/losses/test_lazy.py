"""Logits of a compiled model: computed when somebody reads them, and then as good as eager's."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from e2e_adversary import Record, tokens
from e2e_check import assert_close_grads, grads, in_double
from e2e_models import CHUNK, LOSS_CHUNK, VOCAB, build, plain, sample
from e2e_subject import Subject
from test_calls import exact

from streambp_fx.runtime.lazy_tensors import LazyTensor

OPTIONS = {"chunk": CHUNK, "loss_chunk": LOSS_CHUNK}
LENGTH = 37


class Pair:
    """An eager model and a compiled one with the same weights, and outputs of both on one batch."""

    def __init__(self, **options: Any) -> None:
        self.eager = build("llama")
        self.model = copy.deepcopy(self.eager)
        self.call = torch.compile(self.model, backend="streambp", options={**OPTIONS, **options})
        self.batch = plain(2, LENGTH)

    def outputs(self) -> tuple[Any, Any]:
        self.eager.zero_grad()
        self.model.zero_grad()
        return self.eager(**self.batch), self.call(**self.batch)

    def check_grads(self) -> None:
        assert_close_grads(grads(self.model), grads(self.eager), 1e-9)


@pytest.fixture(scope="module", autouse=True)
def _double() -> Iterator[None]:
    """Two gradients that meet in a float32 cast would differ by its roundings."""
    torch._dynamo.reset()
    with in_double(functools.partial(build, "llama")):
        yield


@pytest.fixture(scope="module")
def pair(_double: None) -> Pair:
    return Pair()


READS: dict[str, Callable[[Any], Any]] = {
    "read": lambda x: x + 0,
    "indexed": lambda x: x[:, -1, 3:5],
    "moved": lambda x: x.to("cpu", torch.float32) + 0,
    "cast": lambda x: x.float() + 0,
    "argmax": lambda x: x.argmax(-1),
    "compared": lambda x: x > 0,
    "numpy": lambda x: torch.from_numpy(x.detach().numpy()),
    "list": lambda x: torch.tensor(x[0, 0].tolist()),
    "joined": lambda x: torch.cat([x, x], 1),
    "softmax": lambda x: torch.nn.functional.log_softmax(x, -1),
    "into another": lambda x: torch.zeros(x.shape, dtype=x.dtype).copy_(x),
    "an item": lambda x: torch.tensor(x[0, 0, 0].item()),
    "iterated": lambda x: torch.stack(list(x)),
    "divided in place": lambda x: x.div_(2.0),
    "pickled": lambda x: pickle.loads(pickle.dumps(x.detach())),
    "saved": lambda x: _saved(x.detach()),
    "copied": lambda x: copy.deepcopy(x.detach()),
}


def _saved(x: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("how", READS)
def test_reads(pair: Pair, how: str) -> None:
    want, got = pair.outputs()
    assert isinstance(got.logits, LazyTensor) and got.logits._value is None
    with torch.no_grad():
        expected, found = READS[how](want.logits), READS[how](got.logits)
    assert type(found) is torch.Tensor
    torch.testing.assert_close(found, expected)


def test_what_is_known_without_reading(pair: Pair) -> None:
    want, got = (o.logits for o in pair.outputs())
    for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "is_cuda"):
        assert getattr(got, name) == getattr(want, name), name
    assert (got.size(1), got.dim(), got.numel(), len(got)) == (want.size(1), 3, want.numel(), 2)
    assert got.grad_fn is not None and isinstance(got, torch.Tensor) and hash(got) == hash(got)
    assert isinstance(got.detach(), LazyTensor) and not got.detach().requires_grad
    assert isinstance(got.float(), LazyTensor) and got.float().dtype == torch.float32
    assert got.double() is got
    assert got._value is None


def test_printed(pair: Pair) -> None:
    want, got = (o.logits for o in pair.outputs())
    assert repr(got.detach() + 0) == repr(want.detach())
    assert "tensor(" in repr(got) and "tensor(" in f"{got}"


def test_nobody_reads_them(pair: Pair) -> None:
    want, got = pair.outputs()
    want.loss.backward()
    got.loss.backward()
    assert got.logits._value is None
    pair.check_grads()
    torch.testing.assert_close(got.logits.detach() + 0, want.logits.detach())


DIFFERENTIATED: dict[str, Callable[[Any], Any]] = {
    "a loss on them as well": lambda o: o.loss + o.logits.square().mean(),
    "through a cast": lambda o: o.loss + o.logits.float().square().mean().double(),
    "twice": lambda o: o.loss + o.logits[:, :5].mean() + (o.logits * 3).exp().mean(),
    "without the loss": lambda o: o.logits.square().mean(),
    "changed in place": lambda o: o.loss + o.logits.mul_(2.0).square().mean(),
    "the loss halved": lambda o: 0.5 * o.loss + o.logits.tanh().mean(),
    "after a metric": lambda o: _measured(o, torch.no_grad),
    "after a metric in inference mode": lambda o: _measured(o, torch.inference_mode),
    "after a metric of them detached": lambda o: o.loss + o.logits.detach().max() * o.logits.exp().mean(),
}


def _measured(output: Any, mode: Callable[[], Any]) -> Any:
    with mode():
        output.logits.argmax(-1)
    return output.loss + output.logits.logsumexp(-1).square().mean()


@pytest.mark.parametrize(
    "how", sample(DIFFERENTIATED, "a loss on them as well", "twice", "changed in place", "after a metric")
)
def test_gradients_reach_the_model(pair: Pair, how: str) -> None:
    want, got = pair.outputs()
    DIFFERENTIATED[how](want).backward()
    DIFFERENTIATED[how](got).backward()
    # a cast to float32 in the middle is as exact as float32
    rtol = 1e-6 if how == "through a cast" else 1e-9
    assert_close_grads(grads(pair.model), grads(pair.eager), rtol)


CHANGED: dict[str, Callable[[Any], list[Any]]] = {
    "a cast": lambda x: [x.float(), x.mul_(2), x],
    "a cast of a cast": lambda x: [x.float().half(), x.float(), x.mul_(2), x],
    "a copy": lambda x: [x.to(x.dtype, copy=True), x.mul_(2)],
    "detached": lambda x: [x.detach(), x.detach().float(), x.mul_(2), x],
    "through what is detached": lambda x: [x.float(), x.detach().mul_(2), x],
    "through a view": lambda x: [x.detach().float(), x.view(-1).mul_(2), x],
}


@pytest.mark.parametrize("how", CHANGED)
def test_what_was_derived_before_a_change_in_place(pair: Pair, how: str) -> None:
    """A cast is a copy, and what is detached shares its memory."""
    want, got = ([x + 0 for x in CHANGED[how](o.logits)] for o in pair.outputs())
    torch.testing.assert_close(got, want)


def test_a_small_vocabulary_is_changed_in_place() -> None:
    """The head is no wider than what it is made of: the logits are an output of a segment, which is kept."""

    class Small(Subject):
        def forward(self, input_ids: torch.Tensor) -> Any:
            x = self.embed(input_ids)
            logits = self.head(x + self.attend(self.norm(x)))
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())
            return {"loss": loss, "logits": logits, "hidden": x * 2}

    def run(m: Any, call: Any, record: Record) -> None:
        for length in (33, 20):
            m.zero_grad()
            output = call(tokens(2, length))
            output["logits"] /= 3
            output["logits"][..., 0] = -5.0
            (output["loss"] + output["logits"].exp().mean()).backward()
            record("logits", output["logits"])
            record.state(m)

    exact(Small, run, "compile")


@pytest.mark.slow
def test_an_autograd_function_of_the_user(pair: Pair) -> None:
    """It does not go through Python's dispatch of subclasses; its gradient must arrive all the same."""

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 2

    want, got = pair.outputs()
    (want.loss + Double.apply(want.logits).square().mean()).backward()
    (got.loss + Double.apply(got.logits).square().mean()).backward()
    pair.check_grads()


def test_after_backward_the_value_is_there_and_its_gradient_is_refused(pair: Pair) -> None:
    want, got = pair.outputs()
    want.loss.backward()
    got.loss.backward()
    assert torch.equal(got.logits.argmax(-1), want.logits.argmax(-1))
    with pytest.raises(RuntimeError, match="second time"):
        got.logits.mean().backward()


def test_the_gradient_of_the_loss_is_not_theirs() -> None:
    """Eager's loss goes through its logits; this one is made without them."""
    ask = {
        "a hook": lambda out: out.logits.register_hook(print),
        "kept": lambda out: out.logits.retain_grad(),
        "taken": lambda out: torch.autograd.grad(out.loss, out.logits, allow_unused=True),
        "among others": lambda out: torch.autograd.graph.register_multi_grad_hook((out.logits,), print),
    }
    pair = Pair()
    for how in ask.values():
        with pytest.raises(RuntimeError, match=r"not that of the loss.*\"keep\""):
            how(pair.outputs()[1])


def test_after_the_weights_have_changed_they_are_an_error() -> None:
    pair = Pair()
    _, output = pair.outputs()
    output.loss.backward()
    torch.optim.SGD(pair.model.parameters(), lr=0.1).step()
    with pytest.raises(RuntimeError, match=r"changed since.*\"keep\""):
        output.logits.argmax(-1)


@pytest.mark.slow
def test_keep_stores_them() -> None:
    pair = Pair(logits="keep")
    want, got = pair.outputs()
    assert type(got.logits) is torch.Tensor
    (want.loss + want.logits.square().mean()).backward()
    (got.loss + got.logits.square().mean()).backward()
    pair.check_grads()


@pytest.mark.slow
def test_drop_leaves_none() -> None:
    want, got = (pair := Pair(logits="drop")).outputs()
    want.loss.backward()
    got.loss.backward()
    assert got.logits is None
    pair.check_grads()


@pytest.mark.slow
def test_without_labels_they_are_real_and_differentiable() -> None:
    pair = Pair()
    del pair.batch["labels"]
    want, got = pair.outputs()
    assert type(got.logits) is torch.Tensor and got.logits.shape == (2, LENGTH, VOCAB)
    want.logits.square().mean().backward()
    got.logits.square().mean().backward()
    pair.check_grads()


@pytest.mark.slow
def test_transform_can_be_lazy_too() -> None:
    import streambp_fx

    eager = build("llama")
    model = streambp_fx.transform(copy.deepcopy(eager), logits="lazy", **OPTIONS)
    batch = plain(2, LENGTH)
    want, got = eager(**batch), model(**batch)
    assert isinstance(got.logits, LazyTensor)
    (want.loss + want.logits.square().mean()).backward()
    (got.loss + got.logits.square().mean()).backward()
    assert_close_grads(grads(model), grads(eager), 1e-9)
