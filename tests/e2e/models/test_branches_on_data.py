"""Experts that run only if some row has chosen them, trained: weights, policies, memory."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from e2e_check import grads
from torch import Tensor, nn

import streambp_fx
from streambp_fx.measure.live_bytes import peak_live_bytes

VOCAB, EXPERTS, TOP, IGNORED = 23, 6, 2, -100
# By which question a layer asks; rows are chosen by their first entries.
FORMS = ("any", "continue", "counts", "hit")


class Experts(nn.Module):
    def __init__(self, width: int, form: str, inner: int) -> None:
        super().__init__()
        self.form, self.router = form, nn.Linear(width, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width)) for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        weights, chosen = (self.router(rows) + bias).softmax(-1).topk(TOP, -1)
        return getattr(self, self.form)(rows, weights, chosen).view_as(x)

    def any(self, rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            mask = (chosen == e).any(-1)
            if mask.any():
                out[mask] += expert(rows[mask]) * (weights * (chosen == e)).sum(-1)[mask, None]
        return out

    def continued(self, rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        mask = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        for e in range(EXPERTS):
            choice, row = torch.where(mask[e])
            if row.numel() == 0:
                continue
            out.index_add_(0, row, self.experts[e](rows[row]) * weights[row, choice, None])
        return out

    def counts(self, rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()
        for e in range(EXPERTS):
            if counts[e] == 0:
                continue
            row, choice = torch.where(chosen == e)
            out[row] += self.experts[e](rows[row]) * weights[row, choice, None]
        return out

    def hit(self, rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        mask = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        for e in mask.sum((-1, -2)).nonzero():
            choice, row = torch.where(mask[e].squeeze(0))
            out = out.index_add(0, row, self.experts[e](rows[row]) * weights[row, choice, None])
        return out


class Model(nn.Module):
    def __init__(self, form: str, width: int = 8, inner: int = 12, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(1)
        form = "continued" if form == "continue" else form
        self.embed, self.head = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB, bias=False)
        self.attention = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.experts = nn.ModuleList(Experts(width, form, inner) for _ in range(layers))
        self.double()

    def forward(self, ids: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for attention, experts in zip(self.attention, self.experts, strict=True):
            q, k, v = (t.unflatten(2, (2, -1)).transpose(1, 2) for t in attention(x).chunk(3, -1))
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            x = x + experts(x, bias)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def batch(step: int, rows: int = 2, length: int = 37) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens; what keeps rows from some experts, others in each step; labels, whose end is ignored."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCAB, (rows, length), generator=generator)
    bias = torch.zeros(EXPERTS, dtype=torch.float64)
    bias[[step % EXPERTS, (2 * step + 1) % EXPERTS]] = -1e4
    labels = ids.clone()
    labels[-1, length // 2 :] = IGNORED
    return ids, bias, labels


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert [n for n in wanted if wanted[n] is None] == [n for n in wanted if found[n] is None]
    for name, want in wanted.items():
        if want is not None:
            torch.testing.assert_close(found[name], want, rtol=1e-9, atol=1e-12, msg=name)


def chunked(model: nn.Module) -> tuple[int, int]:
    segments = streambp_fx.schedule(model).segments  # type: ignore[union-attr]
    layers = [s for s in segments if len(s.nodes) > 1]
    return sum(s.chunked for s in layers), len(layers)


OFTEN = ("continue-transform", "hit-compile")
CASES = [f"{form}-{door}" for form in FORMS for door in ("transform", "compile")]


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c in OFTEN else pytest.mark.slow) for c in CASES]
)
def test_weights_after_steps_with_weight_decay(case: str) -> None:
    """An expert that no row has chosen has no gradient, and is not decayed."""
    form, door = case.split("-")
    torch._dynamo.reset()
    eager = Model(form)
    model = copy.deepcopy(eager)
    if door == "transform":
        call: Any = streambp_fx.transform(model, chunk=8, seq_dim={"ids": 1}, on_error="raise")
    else:
        options = {"chunk": 8, "on_error": "raise"}
        call = torch.compile(model, backend="streambp", options=options, fullgraph=True)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.5) for m in (eager, model)]
    nones = 0
    for step, (rows, length) in enumerate(((2, 37), (3, 21), (1, 5), (2, 37))):
        given = batch(step, rows, length)
        for run, optimizer in zip((eager, call), optimizers, strict=True):
            optimizer.zero_grad()
            run(*given).backward()
        assert_same(grads(model), grads(eager))
        nones += sum(p.grad is None for p in eager.parameters())
        for optimizer in optimizers:
            optimizer.step()
    assert nones >= 4 * 2 * 2 * 4  # in each step two experts of each layer, of four parameters
    assert_same(dict(model.named_parameters()), dict(eager.named_parameters()))
    made, segments = chunked(model)
    assert made == segments >= 3


POLICIES: dict[str, dict[str, Any]] = {
    "attention kept": {"save": "attention"},
    "chunks first": {"order": "chunks"},
    "every second": {"every": 2},
    "on disk": {"offload": "disk"},
    "on disk, rows too": {"offload": "disk", "offload_rows": True},
    "sums in the dtype of weights": {"accumulate": "weights"},
    "chosen": {"memory": "1GiB", "chunk": "auto"},
    "never checked": {"check": "never"},
}


@pytest.mark.filterwarnings("ignore:order=.chunks. is followed in part")  # the questions are asked at the end
@pytest.mark.parametrize("policy", [*(pytest.param(p, marks=pytest.mark.slow) for p in POLICIES)])
def test_policies(policy: str) -> None:
    eager = Model("continue")
    model = copy.deepcopy(eager)
    options = {"chunk": 8, **POLICIES[policy]}
    streambp_fx.transform(model, seq_dim={"ids": 1}, **options)
    for step in range(3):
        given = batch(step, 2, 37 - step)
        for one in (eager, model):
            one.zero_grad()
            one(*given).backward()
        assert_same(grads(model), grads(eager))
    assert chunked(model)[0] >= 3


def test_accumulated_gradients() -> None:
    """What has a gradient keeps it where a later batch gives it none."""
    eager = Model("any")
    model = copy.deepcopy(eager)
    streambp_fx.transform(model, chunk=8, seq_dim={"ids": 1})
    for step in range(3):
        for one in (eager, model):
            one(*batch(step)).backward()
        assert_same(grads(model), grads(eager))


@pytest.mark.slow
def test_less_memory_than_checkpointing() -> None:
    from torch.utils.checkpoint import checkpoint

    eager = Model("continue", width=32, inner=256, layers=4)
    model = copy.deepcopy(eager)
    given = batch(0, 1, 2048)
    for layer in eager.experts:
        layer.forward = lambda *a, f=layer.forward: checkpoint(f, *a, use_reentrant=False)  # type: ignore[method-assign]
    streambp_fx.transform(model, chunk=128, seq_dim={"ids": 1})
    peaks = []
    for one in (eager, model):
        one(*given).backward()
        one.zero_grad()
        known = [*one.parameters(), *given]
        peaks.append(peak_live_bytes(lambda one=one: one(*given).backward(), known))
    assert peaks[1] * 2.5 < peaks[0], peaks


def _hook(parameter: Tensor, on: str, seen: Callable[[], None]) -> Any:
    """What keeps a hook on the gradient of a parameter alive."""

    def called(*gradients: Any) -> Any:
        seen()
        return None if on == "node, after" else _twice(gradients[0])

    if on == "tensor":
        return parameter.register_hook(called)
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    return node, node.register_hook(called) if on == "node, after" else node.register_prehook(called)


def _twice(gradients: Any) -> Any:
    return tuple(2 * g for g in gradients) if isinstance(gradients, tuple) else 2 * gradients


@pytest.mark.parametrize(
    "on", ["tensor", pytest.param("node", marks=pytest.mark.slow), pytest.param("node, after")]
)
def test_hooks_are_not_called_for_nothing(on: str) -> None:
    """PyTorch calls hooks with None; eager does not come to those of an expert that did not run."""
    kept = []
    eager = Model("any")
    model = copy.deepcopy(eager)
    streambp_fx.transform(model, chunk=8, seq_dim={"ids": 1})
    seen: list[list[str]] = [[], []]
    for step, hooked in enumerate((False, True, True)):
        for one, own in zip((eager, model), seen, strict=True):
            for name, p in one.experts.named_parameters() if step == 1 else ():
                kept.append(_hook(p, on, functools.partial(own.append, name)))
            one.zero_grad()
            expected = pytest.warns(streambp_fx.StreamBPWarning, match="has a hook on it")
            with expected if hooked and one is model else contextlib.nullcontext():
                one(*batch(step)).backward()
        assert_same(grads(model), grads(eager))
    assert sorted(seen[0]) == sorted(seen[1]) and seen[0] and kept


class Adapted(nn.Module):
    """Rows of special tokens go through a layer of their own, which alone is trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.adapter = nn.Embedding(VOCAB, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, VOCAB)
        self.double().requires_grad_(False)
        self.adapter.requires_grad_(True)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.adapted(self.embed(ids), ids == VOCAB - 1)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    def adapted(self, x: Tensor, special: Tensor) -> Tensor:
        if special.any():
            x[special] = self.adapter(x[special])
        return x


@pytest.mark.filterwarnings("ignore::streambp_fx.StreamBPWarning")  # not streamed
def test_a_loss_without_a_gradient() -> None:
    eager = Adapted()
    model = copy.deepcopy(eager)
    streambp_fx.transform(model, chunk=8, seq_dim={"ids": 1})
    special, plain = torch.full((2, 37), VOCAB - 1), torch.zeros(2, 37, dtype=torch.int64)
    for ids in (special, plain, special):
        losses = [one(ids) for one in (eager, model)]
        torch.testing.assert_close(*losses)
        assert losses[0].requires_grad == losses[1].requires_grad


class First(nn.Module):
    """The first of some rows: there is none where no row is asked about."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.taken(self.embed(ids), ids == VOCAB - 1))

    def taken(self, x: Tensor, special: Tensor) -> Tensor:
        if special.any():
            x[special] = F.dropout(x[special], 0.5) + x[special][0]
        return x


class Capped(First):
    """A number that changes is read first where rows are asked about, and once more behind."""

    cap = 1.0

    def taken(self, x: Tensor, special: Tensor) -> Tensor:
        if special.any():
            x[special] = x[special].clamp(max=self.cap)
        return x.clamp(min=-9.0, max=self.cap)


def test_a_number_of_a_body_that_is_read_behind_it() -> None:
    model = Capped()
    torch._dynamo.reset()
    call = torch.compile(model, backend="streambp", options={"chunk": 8})
    ids = torch.arange(74).view(2, 37) % (VOCAB - 1)
    for cap in (1.0, 0.5, 0.25, 0.125):
        model.cap = cap
        with torch.no_grad():
            torch.testing.assert_close(call(ids), model(ids))


def test_a_step_without_gradients() -> None:
    """Of its graph nothing is proved: no body is run where eager runs none."""
    model = First()
    torch._dynamo.reset()
    call = torch.compile(model, backend="streambp", options={"chunk": 8}, fullgraph=True)
    for ids in (torch.zeros(2, 37, dtype=torch.int64), torch.full((2, 21), VOCAB - 1)):
        results = []
        for one in (model, call):
            torch.manual_seed(0)
            with torch.no_grad():
                results.append((one(ids), torch.rand(1)))
        torch.testing.assert_close(*results)
