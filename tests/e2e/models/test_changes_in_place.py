"""Values and buffers that a model changes in place: seen through every name, and written once per step."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from e2e_check import assert_close_grads, grads
from e2e_models import sample
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import streambp_fx

VOCAB, WIDTH = 19, 12
Middle = Callable[["Model", Tensor], Tensor]


class Model(nn.Module):
    """Embedding, an attention layer, something that changes a value in place, a loss."""

    def __init__(self, middle: Middle) -> None:
        super().__init__()
        self.middle = middle
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("cache", torch.zeros(4, 64, WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = (t.unflatten(2, (3, 4)).transpose(1, 2) for t in (x, self.first(x), x))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = self.middle(self, x)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "flatten": lambda h: h.flatten(0, 1),
    "unflatten": lambda h: h.unflatten(2, (3, 4)),
    "movedim": lambda h: h.movedim(1, 0),
    "swapaxes": lambda h: h.swapaxes(0, 1),
    "mT": lambda h: h.mT,
    "adjoint": lambda h: h.adjoint(),
    "view_as": lambda h: h.view_as(h),
    "reshape_as": lambda h: h.reshape_as(h),
    "expand_as": lambda h: h.expand_as(h),
    "narrow": lambda h: h.narrow(2, 0, 5),
    "squeeze": lambda h: h.unsqueeze(1).squeeze(),
    "squeeze of dims": lambda h: h.unsqueeze(1).squeeze((1,)),
    "select": lambda h: h[..., 3],
    "diagonal": lambda h: h.diagonal(dim1=0, dim2=2),
    "a slice with a step": lambda h: h[..., ::2],
    "tensor_split": lambda h: h.tensor_split(2, -1)[1],
    "type_as": lambda h: h.type_as(h),
    "to": lambda h: h.to(torch.float64),
    "contiguous": lambda h: h.contiguous(),
    "dropout that drops nothing": lambda h: F.dropout(h, 0.0),
    "another dtype and back": lambda h: h.view(torch.int64).view(h.dtype),
}
UNCHUNKED_VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "unfold": lambda h: h.unfold(2, 4, 4),
    "rows": lambda h: h[:, 1:],
    "one row": lambda h: h[:, 0],
}


def changed(view: Callable[[Tensor], Tensor]) -> Middle:
    """A view is changed, and its base is read."""

    def middle(m: Model, x: Tensor) -> Tensor:
        h = m.first(x)
        view(h).mul_(0.5)
        return x + m.second(h)

    return middle


def base_changed(view: Callable[[Tensor], Tensor]) -> Middle:
    """A base is changed, and its view is read."""

    def middle(m: Model, x: Tensor) -> Tensor:
        h = m.first(x) + 1
        seen = view(h)
        h.mul_(0.5)
        return x * (seen * seen).mean() + h

    return middle


def no_grad(m: Model, x: Tensor) -> Tensor:
    h = m.first(x)
    with torch.no_grad():
        h.clamp_(-0.3, 0.3)
    return x + h


def detached(m: Model, x: Tensor) -> Tensor:
    h = m.first(x)
    F.dropout(h.detach(), 0.0).clamp_(-0.3, 0.3)
    return x + h


def weight(m: Model, x: Tensor) -> Tensor:
    """It has been read before, see test_parameter_changes.py."""
    before = m.second.weight.sum()
    m.second.weight.data.clamp_(-0.2, 0.2)
    return x + m.second(x) * before


def elements(m: Model, x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for i in range(WIDTH):
        out[:, :, i] = x[:, :, i] * 0.5 * (i + 1)
    out[:, :, :3] = 0
    out[..., 3].zero_()
    out[..., 4:6].fill_(2.0)
    return x + m.second(out)


def elementwise(m: Model, x: Tensor) -> Tensor:
    h = m.first(x)
    h.masked_fill_(h < 0, 0).add_(x, alpha=0.3)
    h *= 2
    h = F.dropout(torch.sigmoid_(h), 0.0, inplace=True) + x
    h += x
    return h


def under_another_mode(m: Model, x: Tensor) -> Tensor:
    """The view is made anew where gradients are off; what is made of it later has one."""
    h = m.first(x)
    seen = h.view(-1, WIDTH)
    h.mul_(2)
    with torch.no_grad():
        scale = seen.sum(-1, keepdim=True)
    return x + (seen * 3 * scale).view(x.shape)


def own_mask(m: Model, x: Tensor) -> Tensor:
    mask = torch.zeros(x.shape[1], x.shape[1], dtype=x.dtype)
    mask.masked_fill_(torch.ones_like(mask, dtype=torch.bool).triu_(1), float("-inf"))
    q = x.unflatten(2, (3, 4)).transpose(1, 2)
    return x + F.scaled_dot_product_attention(q, q, q, attn_mask=mask).transpose(1, 2).flatten(2)


def checkpointed(m: Model, x: Tensor) -> Tensor:
    def part(x: Tensor) -> Tensor:
        h = m.first(x)
        h.mul_(2)
        return h + x

    return checkpoint(part, x, use_reentrant=False)


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clamp(-0.3, 0.3)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def around_a_function(m: Model, x: Tensor) -> Tensor:
    h = m.first(x)
    h.mul_(0.5)
    y = Clipped.apply(h)
    y.add_(1)
    y.view(-1, WIDTH).mul_(3)
    return x + y


def counter(m: Model, x: Tensor) -> Tensor:
    m.steps += 1
    m.average.mul_(0.9).add_(0.1)
    return x * (1 + m.average) * m.steps


def read_before(m: Model, x: Tensor) -> Tensor:
    """What the backward computes again reads the buffer as it was."""
    x = x + (m.second(x) + m.average).tanh()
    m.average.mul_(0.9).add_(0.1)
    return x


def average(m: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.average.mul_(0.9).add_(m.first(x).mean((0, 1)), alpha=0.1)
    return x + m.second(x) * m.average


def rows_of_a_cache(m: Model, x: Tensor) -> Tensor:
    m.cache[: x.shape[0], : x.shape[1]] = x.detach()
    return x + m.second(m.cache[: x.shape[0], : x.shape[1]])


def instance_norm(m: Model, x: Tensor) -> Tensor:
    mean, var = m.norm.running_mean, m.norm.running_var
    return x + F.instance_norm(x.transpose(1, 2), mean, var, use_input_stats=True).transpose(1, 2)


def first_read_without_gradients(m: Model, x: Tensor) -> Tensor:
    """A view of what has been changed is first read where no gradients are recorded, then where they are."""
    h = m.first(x) + 1
    seen = h.narrow(2, 0, 5)
    h.mul_(0.5)
    with torch.no_grad():
        scale = seen.abs().mean(-1, keepdim=True)
    return x + h + F.pad(seen * (1 + scale), (0, WIDTH - 5))


STREAMED: dict[str, Middle] = {
    **{f"a view: {name}": changed(view) for name, view in VIEWS.items() if "dtype" not in name},
    "elements": elements,
    "elementwise": elementwise,
    "under another mode": under_another_mode,
    "a mask": own_mask,
    "checkpointed": checkpointed,
    "around a custom function": around_a_function,
    "a counter": counter,
    "read before it is written": read_before,
    "first read without gradients": first_read_without_gradients,
    "spectral norm": lambda m, x: x + m.spectral(x),
}
WHOLE: dict[str, Middle] = {
    **{f"a view: {name}": changed(view) for name, view in UNCHUNKED_VIEWS.items()},
    **{f"a base: {n}": base_changed(v) for n, v in {**VIEWS, **UNCHUNKED_VIEWS}.items()},
    "an average": average,
    "a cache": rows_of_a_cache,
    "batch norm": lambda m, x: x + m.norm(x.transpose(1, 2)).transpose(1, 2),
    "instance norm": instance_norm,
}


def by_strides(m: Model, x: Tensor) -> Tensor:
    h = m.first(x)
    h.as_strided((h.shape[0] * h.shape[1], WIDTH), (WIDTH, 1)).mul_(0.5)
    return x + h


def read_by_strides(m: Model, x: Tensor) -> Tensor:
    h = m.first(x)
    return x + h.as_strided(h.shape, h.stride())


UNSTREAMED: dict[str, Middle] = {
    "no_grad": no_grad,
    "detached": detached,
    "a weight": weight,
    "by strides": by_strides,
    "read by strides": read_by_strides,
}
OFTEN = {
    "a view: flatten",
    "a view: dropout that drops nothing",
    "elements",
    "under another mode",
    "a counter",
    "read before it is written",
    "first read without gradients",
}
OFTEN_WHOLE = {"a base: movedim", "batch norm"}


def said(middle: Middle) -> tuple[Model, list[str]]:
    """Two steps of a model, eager and streamed; the streamed one and what it warned of.

    Without the self-check, which would let a wrong step run unstreamed, and right.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = Model(middle).double()
    streamed = copy.deepcopy(eager)
    options = {"chunk": 8, "loss_chunk": 8, "check": "never"}
    run = torch.compile(streamed, backend="streambp", options=options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for length in (33, 12):
            ids = torch.randint(0, VOCAB, (2, length))
            losses = []
            for model, call in ((eager, eager), (streamed, run)):
                model.zero_grad()
                losses.append(call(ids))
                losses[-1].backward()
            assert abs(float(losses[0] - losses[1])) < 1e-12
            assert_close_grads(grads(streamed), grads(eager), 1e-9)
            for name, buffer in eager.named_buffers():
                torch.testing.assert_close(streamed.get_buffer(name), buffer, rtol=1e-12, atol=1e-12)
    found = [str(w.message) for w in caught if issubclass(w.category, streambp_fx.StreamBPWarning)]
    return streamed, found


@pytest.mark.parametrize("name", sample(list(STREAMED), *OFTEN))
def test_streamed(name: str) -> None:
    streamed, warned = said(STREAMED[name])
    schedule = streambp_fx.schedule(streamed)
    assert schedule is not None and all(s.chunked for s in schedule.segments), str(schedule)
    assert not warned


def test_the_printed_step_writes_buffers() -> None:
    streamed, _ = said(STREAMED["a counter"])
    before = copy.deepcopy(streamed)
    namespace: dict[str, Any] = {}
    exec(streambp_fx.schedule(streamed).code(), namespace)  # type: ignore[union-attr]
    parameters, ids = dict(before.named_parameters()), torch.randint(0, VOCAB, (2, 33))
    loss, _ = namespace["step"](ids=ids, parameters=parameters, buffers=dict(before.named_buffers()))
    assert float(streamed(ids)) == pytest.approx(float(loss), rel=1e-12)
    assert int(before.steps) == int(streamed.steps) == 3
    torch.testing.assert_close(before.average, streamed.average)


@pytest.mark.parametrize("name", sample(list(WHOLE), *OFTEN_WHOLE))
def test_in_part_unchunked(name: str) -> None:
    streamed, warned = said(WHOLE[name])
    schedule = streambp_fx.schedule(streamed)
    if schedule is None:
        assert any("runs unstreamed" in text for text in warned)
        return
    assert any(s.chunked and s.mixings for s in schedule.segments), str(schedule)
    assert any("unchunked" in text for text in warned)


@pytest.mark.parametrize("name", UNSTREAMED)
def test_unstreamed_where_there_is_no_functional_form(name: str) -> None:
    """Changes that autograd does not see, and ops that say where in memory something lies."""
    streamed, warned = said(UNSTREAMED[name])
    assert streambp_fx.schedule(streamed) is None
    why = "reads memory by strides" if "strides" in name else "autograd does not see it"
    assert why in warned[0] and "test_changes_in_place.py" in warned[0]


def test_a_bug_of_ours_is_no_fact_about_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("streambp_fx.passes.graph.functionalization._changed")
    streamed = streambp_fx.transform(Model(STREAMED["a counter"]).double(), chunk=8, seq_dim={"ids": 1})
    said_so = "'capture' failed: NameError: name '_changed' is not defined. Please report this"
    with pytest.warns(streambp_fx.StreamBPWarning, match=said_so):
        streamed(torch.randint(0, VOCAB, (2, 33)))


def test_a_schedule_says_that_its_graph_runs_unstreamed() -> None:
    """Its program would be right for one length alone, as the first step finds."""
    model = Model(lambda m, x: x.abs() ** (1 / x.shape[1])).double()
    streamed = streambp_fx.transform(model, chunk=8, seq_dim={"ids": 1})
    with pytest.warns(streambp_fx.StreamBPWarning, match="ordinary number of the sequence length"):
        streamed(torch.randint(0, VOCAB, (2, 33))).backward()
    assert "the graph runs unstreamed: pass 'vjp' failed: FixedLength" in str(streambp_fx.schedule(model))


def test_buffers_that_share_memory() -> None:
    """What the change of one does to the other is eager's to know."""
    eager = Model(lambda m, x: x * (1 + m.average.mul_(0.5).sum()) * (1 + m.other.sum())).double()
    eager.average.fill_(1.0)
    eager.register_buffer("other", eager.average.view(3, 4))
    streamed = copy.deepcopy(eager)
    streamed.other = streamed.average.view(3, 4)
    run = torch.compile(streamed, backend="streambp", options={"chunk": 8})
    ids = torch.randint(0, VOCAB, (2, 33))
    with pytest.warns(streambp_fx.StreamBPWarning, match="shares memory"):
        loss = run(ids)
    assert float(loss) == pytest.approx(float(eager(ids)), rel=1e-12)


def test_logits_are_read_after_a_buffer_was_written() -> None:
    """A lazy output of a padded step runs the forward again, on the buffers as they were."""

    class Counting(Model):
        def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            x = counter(self, self.embed(ids))
            q = x.unflatten(2, (3, 4)).transpose(1, 2)
            x = x + F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)
            logits = self.head(self.second(x))
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), logits

    torch.manual_seed(0)
    eager = Counting(counter).double()
    streamed = copy.deepcopy(eager)
    run = torch.compile(streamed, backend="streambp", options={"chunk": 8, "loss_chunk": 8})
    ids = torch.randint(0, VOCAB, (2, 33))
    labels = ids.clone()
    labels[:, 15:] = -100
    for _ in range(2):
        (want, logits), (got, lazy) = eager(ids, labels), run(ids, labels)
        assert float(want) == pytest.approx(float(got), rel=1e-12)
        torch.testing.assert_close(lazy + 0, logits, rtol=1e-10, atol=1e-12)
    assert int(streamed.steps) == 2


def test_complex_values_made_without_gradients() -> None:
    """What leaves a region without gradients has none, complex values too."""

    def middle(m: Model, x: Tensor) -> Tensor:
        pairs = lambda t: torch.view_as_complex(t.unflatten(2, (WIDTH // 2, 2)).contiguous())  # noqa: E731
        with torch.no_grad():
            turned = pairs(m.first(x)) * 2
        return x + torch.view_as_real(turned * pairs(m.second(x))).flatten(2)

    streamed, warned = said(middle)
    schedule = streambp_fx.schedule(streamed)
    assert schedule is not None and all(s.chunked for s in schedule.segments), str(schedule)
    assert not warned
