"""Results lie in memory as the model's do: what a caller may view of them, or change, is the same."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from e2e_check import assert_all_chunked, in_double, through
from e2e_models import sample
from torch import Tensor, nn

import streambp_fx
from streambp_fx.runtime.result_layout import ResultLayout

IDS = torch.arange(2 * 33).reshape(2, 33) * 7 % 50


class Model(nn.Module):
    """One layer of attention and a head, in some order of dims."""

    def __init__(self, ending: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.ending = ending
        self.embed, self.qkv, self.head = nn.Embedding(50, 16), nn.Linear(16, 48), nn.Linear(16, 50)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        return self.ending(self.head(x))


# how a model ends, and how its caller views that
ENDINGS = {
    "classes first": (lambda y: y.transpose(1, 2), lambda y: y.transpose(1, 2).view(-1, 50)),
    "rows first": (lambda y: y.transpose(0, 1), lambda y: y.transpose(0, 1).view(-1, 50)),
    "heads": (
        lambda y: y.unflatten(-1, (5, 10)).permute(0, 2, 1, 3),
        lambda y: y.permute(0, 2, 1, 3).view(-1, 50),
    ),
    "all turned": (lambda y: y.permute(2, 1, 0), lambda y: y.permute(2, 1, 0).view(-1, 50)),
    "one sample": (lambda y: y[:1].transpose(1, 2), lambda y: y.transpose(1, 2).view(-1, 50)),
    "as it is": (lambda y: y, lambda y: y.view(-1, 50)),
}


@pytest.mark.parametrize(
    ("ending", "door"),
    sample(
        [(e, d) for e in ENDINGS for d in ("transform", "compile")],
        ("classes first", "compile"),
        ("heads", "transform"),
    ),
)
def test_a_view_of_the_result(ending: str, door: str) -> None:
    torch._dynamo.reset()
    made, viewed = ENDINGS[ending]

    def step(model: nn.Module, call: Callable[..., Tensor], length: int) -> tuple[Tensor, Tensor]:
        out = call(input_ids=IDS[:, :length])
        flat = viewed(out)
        loss = F.cross_entropy(flat, torch.arange(len(flat)) % 50)
        model.zero_grad()
        loss.backward()
        return out, loss

    with in_double(lambda: Model(made)):
        model = Model(made).double()
        eager = copy.deepcopy(model)
        call = through(door, model)
        for length in (33, 21):
            (want, loss), (got, ours) = step(eager, eager, length), step(model, call, length)
            assert got.stride() == want.stride()
            torch.testing.assert_close(ours, loss, rtol=1e-12, atol=0)
            for p, q in zip(eager.parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(q.grad, p.grad, rtol=1e-9, atol=1e-12)
        assert_all_chunked(model, 1)


# what a model returns of its logits; which of it is changed; what the loss is made of
SHARED = {
    "a view": (lambda y: (y, y.view(-1, 50)), 0, 1),
    "the first is the view": (lambda y: (y.view(-1, 50), y), 0, 1),
    "detached": (lambda y: (y, y.detach()), 1, 0),
    "a slice": (lambda y: (y[:, 1:, ::2], y), 0, 1),
    "two views": (lambda y: (y.transpose(1, 2), y.view(-1, 50)), 1, 0),
    "expanded": (lambda y: (y.unsqueeze(0).expand(3, -1, -1, -1), y), 1, 0),
    "a copy": (lambda y: (y, y.clone()), 1, 0),
    "itself": (lambda y: (y, y), 0, 1),
}


@pytest.mark.parametrize("door", ["transform", "compile"])
@pytest.mark.parametrize("shared", sample(SHARED, "a view", "two views"))
def test_a_change_of_one_result_is_seen_in_the_other(shared: str, door: str) -> None:
    torch._dynamo.reset()
    made, changed, read = SHARED[shared]

    def step(model: nn.Module, call: Callable[..., tuple[Tensor, Tensor]], length: int) -> Tensor:
        model.zero_grad()
        results = call(input_ids=IDS[:, :length])
        results[changed].mul_(0.5)
        loss = results[read].pow(2).sum() + results[read].logsumexp(-1).sum()
        loss.backward()
        return loss

    with in_double(lambda: Model(made)):
        model = Model(made).double()  # type: ignore[arg-type]
        eager = copy.deepcopy(model)
        call = through(door, model)
        for length in (33, 50):
            want, got = step(eager, eager, length), step(model, call, length)
            torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
            for p, q in zip(eager.parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(q.grad, p.grad, rtol=1e-9, atol=1e-12)
        assert_all_chunked(model, 1)


SIBLINGS = {
    **{name: SHARED[name][0] for name in ("a view", "the first is the view", "a slice", "two views")},
    "a view and a slice": lambda y: (y.transpose(1, 2), y[:, -1]),
    "a view of a view": lambda y: (y.transpose(1, 2), y.transpose(1, 2)[:, 3:]),
    "a slice of a slice": lambda y: (y[:, 1:], y[:, 1:, ::2], y.view(-1, 50)),
    "the first has no gradient": lambda y: (looked_at(y), y.transpose(1, 2)),
}


@pytest.mark.parametrize("door", ["transform", "compile"])
@pytest.mark.parametrize("siblings", sample(SIBLINGS, "two views", "a slice of a slice"))
def test_the_gradient_of_a_result_is_its_own(siblings: str, door: str) -> None:
    """A result that is a view has no part in the gradient of another view of the same value."""
    torch._dynamo.reset()
    made = SIBLINGS[siblings]

    def gradients(call: Callable[..., tuple[Tensor, ...]]) -> list[Tensor]:
        results = call(input_ids=IDS)
        trained = [r for r in results if r.grad_fn is not None]
        total = torch.stack([(k + 1) * r.sin().sum() for k, r in enumerate(trained)]).sum()
        return list(torch.autograd.grad(total, trained))

    with in_double(lambda: Model(made)):  # type: ignore[arg-type, return-value]
        model = Model(made).double()  # type: ignore[arg-type]
        eager = copy.deepcopy(model)
        call = through(door, model)
        for want, got in zip(gradients(eager), gradients(call), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
        assert_all_chunked(model, 1)


# a hidden state that the model returns and goes on from, and what else it returns
GONE_ON_FROM = {
    "transposed": lambda x: (x.transpose(0, 1),),
    "made of a transposed": lambda x: ((x.transpose(0, 1) * 2).sin(),),
    "beside a view of the same": lambda x: (x.transpose(0, 1), x.reshape(-1, 16)),
    "beside what it is a view of": lambda x: (x.transpose(0, 1), x),
    "beside a slice of it": lambda x: (x.transpose(1, 2), x.transpose(1, 2)[:, 1:]),
}


class TwoLayers(nn.Module):
    """Two layers, and what is returned of what lies between them."""

    def __init__(self, between: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.between, self.embed = between, nn.Embedding(50, 16)
        self.first, self.second, self.head = nn.Linear(16, 48), nn.Linear(16, 48), nn.Linear(16, 50)

    def layer(self, x: Tensor, qkv: nn.Module) -> Tensor:
        q, k, v = qkv(x).unsqueeze(1).chunk(3, -1)
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)

    def forward(self, input_ids: Tensor) -> tuple[Tensor, ...]:
        results = self.between(self.layer(self.embed(input_ids), self.first))
        h = results[0]
        h = h.transpose(1, 2) if h.shape[2] != 16 else h.transpose(0, 1)
        return self.head(self.layer(h, self.second)).logsumexp(-1).sum(), *results


@pytest.mark.parametrize("door", ["transform", "compile"])
@pytest.mark.parametrize("returned", sample(GONE_ON_FROM, "transposed", "beside a view of the same"))
def test_a_hook_on_a_result_changes_what_comes_before_it(returned: str, door: str) -> None:
    """The gradient of a result has what comes from all that is made of it, and a hook may change it."""
    torch._dynamo.reset()
    made = GONE_ON_FROM[returned]

    def step(model: nn.Module, call: Callable[..., tuple[Tensor, ...]]) -> list[Tensor]:
        model.zero_grad()
        loss, *results = call(input_ids=IDS)
        seen: list[Tensor] = []
        for k, result in enumerate(results):
            result.register_hook(lambda g, k=k: seen.append(g.clone()) or g * (0.5 + k))
        total = loss + sum((k + 2) * r.sin().sum() for k, r in enumerate(results))
        total.backward()
        return [*seen, *(p.grad for p in model.parameters())]

    with in_double(lambda: TwoLayers(made)):  # type: ignore[arg-type, return-value]
        model = TwoLayers(made).double()  # type: ignore[arg-type]
        eager = copy.deepcopy(model)
        call = through(door, model)
        for want, got in zip(step(eager, eager), step(model, call), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
        assert_all_chunked(model, 1)


@torch.no_grad()
def looked_at(y: Tensor) -> Tensor:
    return y.view(-1, 50)


def test_a_view_that_is_taken_without_gradients_has_none() -> None:
    """No gradient goes through it, though it shares memory with a result that has one."""
    with in_double(lambda: Model(lambda y: (y, looked_at(y)))):  # type: ignore[arg-type, return-value]
        model = Model(lambda y: (y, looked_at(y))).double()  # type: ignore[arg-type, return-value]
        eager = copy.deepcopy(model)
        call = streambp_fx.transform(model, chunk=8)
        for of in (eager, call):
            logits, view = of(input_ids=IDS)
            assert view.untyped_storage().data_ptr() == logits.untyped_storage().data_ptr()
            (logits.pow(2).sum() + view.pow(3).sum()).backward()
    for p, q in zip(eager.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-9, atol=1e-12)


def test_the_self_check_takes_the_gradients_of_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of parameters all are right here; that of a result, from which the model goes on, is not."""
    monkeypatch.setattr(ResultLayout, "lay_out", lambda self, instruction, frame: None)

    class Both(Model):
        def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            hidden = self.embed(input_ids).transpose(0, 1)
            return self.head(hidden.tanh()).square().mean(), hidden

    model = Both(lambda y: y)
    with pytest.warns(streambp_fx.StreamBPWarning, match="gradient of output 1 differs by"):
        loss, hidden = streambp_fx.transform(model, chunk=8, logits="keep")(IDS)
    (got,) = torch.autograd.grad(loss, hidden)
    loss, hidden = model(IDS)
    torch.testing.assert_close(got, torch.autograd.grad(loss, hidden)[0])


class WithLoss(Model):
    """The same, with its loss: the logits are lazy."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = super().forward(input_ids)
        return F.cross_entropy(logits, labels), logits


@pytest.mark.parametrize("read", [False, True])
def test_lazy_logits_tell_their_strides(read: bool) -> None:
    with in_double(lambda: WithLoss(ENDINGS["classes first"][0])):
        model = WithLoss(ENDINGS["classes first"][0]).double()
        eager = copy.deepcopy(model)
        want = eager(IDS, IDS)[1]
        _, got = streambp_fx.transform(model, chunk=8)(input_ids=IDS, labels=IDS)
        if read:
            assert torch.equal(got.transpose(1, 2).reshape(-1, 50), got.transpose(1, 2).view(-1, 50))
        assert got.stride() == want.stride()
        assert got.float().stride() == want.float().stride()
        assert not got.is_contiguous()
        torch.testing.assert_close(got + 0, want, rtol=1e-12, atol=1e-12)
    assert any("is lazy" in line for line in str(streambp_fx.schedule(model)).splitlines())
