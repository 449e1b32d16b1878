"""`verify`: it confirms what is right, contradicts what is wrong, and leaves the model alone."""

from __future__ import annotations

import copy
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e_models import CHUNK, LOSS_CHUNK, VOCAB, build, padded, perturb, plain, sample, true_double
from torch import nn
from torch.nn import functional as F

import streambp_fx
import streambp_fx.backend
import streambp_fx.verify
from streambp_fx import VerificationError, verify
from streambp_fx.passes.graph.facts import Reach
from streambp_fx.passes.rules import RULES

HERE = Path(__file__)
verify_module = sys.modules["streambp_fx.verify"]
small = functools.partial(verify, chunk=CHUNK, loss_chunk=LOSS_CHUNK)


def line_of(marker: str) -> int:
    (line,) = (n for n, t in enumerate(HERE.read_text().splitlines(), 1) if t.endswith("# " + marker))
    return line


# -- models that are right -------------------------------------------------------------------------------

RIGHT = {
    "sliding windows": ("mistral", "sdpa", padded(65, "right"), {Reach.ROW, Reach.WINDOW}),
    "windows and all, by hand": ("gemma2", "eager", plain(2, 67), {Reach.ROW, Reach.WINDOW, Reach.CAUSAL}),
    "rows that see nothing": ("gemma2", "eager", padded(67, "left"), {Reach.ROW, Reach.FULL}),
    "ALiBi": ("bloom", "eager", plain(2, 67), {Reach.ROW, Reach.CAUSAL}),
    "padding on the left": ("llama", "sdpa", padded(67, "left"), {Reach.ROW, Reach.CAUSAL}),
}


@pytest.mark.parametrize("case", sample(RIGHT, "padding on the left"))
def test_a_model_is_confirmed(case: str) -> None:
    family, impl, batch, reaches = RIGHT[case]
    model = build(family, impl)
    with true_double(model):
        found = small(model, batch, rtol=1e-9)
    assert found.ok, str(found)
    assert not found.not_claimed and found.rows[:3] == (0, CHUNK - 1, CHUNK) and len(found.rows) == 5
    assert {p.reach for p in found.probes} == reaches
    assert {p.window for p in found.probes if p.reach is Reach.WINDOW} <= {16}
    assert [g.parameter for g in found.gradients] == [n for n, _ in model.named_parameters()]
    assert all(g.norm > 0 for g in found.gradients) and found.worst.difference > 0
    tried = {r for p in found.probes for r in p.rows}
    assert tried == set(found.rows) and all(p.rows for p in found.probes)
    assert "confirmed" in str(found) and json.loads(json.dumps(found.as_dict(), allow_nan=False))["ok"]


@pytest.mark.slow
def test_given_rows_are_tried_in_every_layer() -> None:
    found = small(build("llama", dtype=torch.float32), plain(1, 33), rows=[7, 20])
    assert found.ok and found.rows == (7, 20) and {p.rows for p in found.probes} == {(7, 20)}


# -- analyses that are wrong -----------------------------------------------------------------------------


def both_ways(x: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(x, x, x)  # attends both ways


def scores_both_ways(x: torch.Tensor) -> torch.Tensor:
    weights = (x @ x.transpose(1, 2) / 6).softmax(-1)
    return weights @ x  # attends both ways, by hand


def one_ahead(x: torch.Tensor) -> torch.Tensor:
    i = torch.arange(x.shape[1])
    mask = i[None, :] <= i[:, None] + 1
    return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)  # attends one row ahead


def window_of_nine(x: torch.Tensor) -> torch.Tensor:
    i, j = torch.arange(x.shape[1])[:, None], torch.arange(x.shape[1])[None, :]
    scores = (x @ x.transpose(1, 2)).masked_fill((j > i) | (j <= i - 9), torch.finfo(x.dtype).min)
    return scores.softmax(-1) @ x  # attends to nine rows


def rolled(x: torch.Tensor) -> torch.Tensor:
    return x.roll(1, 1)  # rolls


def flipped(x: torch.Tensor) -> torch.Tensor:
    return x.flip(1)  # flips


class Mixing(nn.Module):
    """A causal LM of one layer that does something to its rows."""

    def __init__(self, mixer: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, 16), nn.Linear(16, VOCAB)
        self.mixer = mixer

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        x = self.embed(input_ids)
        x = x + F.scaled_dot_product_attention(x, x, x, is_causal=True)
        x = x + self.mixer(self.inner(x).tanh())
        loss = None if labels is None else F.cross_entropy(self.head(x).view(-1, VOCAB), labels.view(-1))
        return {"loss": loss}


def mixing(mixer: Callable[[torch.Tensor], torch.Tensor]) -> Mixing:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Mixing(mixer).double()
    perturb(model, 1)
    return model


def claim_rows(monkeypatch: pytest.MonkeyPatch, op: Any) -> None:
    """A rule that takes rows for rows."""
    monkeypatch.setitem(RULES, op, lambda context, node: context.layout(node.args[0]))


def claim_reach(monkeypatch: pytest.MonkeyPatch, reach: Reach, window: int | None = None) -> None:
    """An analysis that is wrong about every mixing op."""
    honest = streambp_fx.backend.analyze

    def wrong(*args: Any, **kwargs: Any) -> Any:
        facts = honest(*args, **kwargs)
        for item in (*facts.mixings.values(), *(s for s in facts.segments if s.mixings)):
            item.reach, item.window = reach, window
        return facts

    monkeypatch.setattr(streambp_fx.backend, "analyze", wrong)


WRONG: dict[str, tuple[Callable, Callable, str]] = {
    "rolls": (rolled, lambda m: claim_rows(m, torch.ops.aten.roll.default), "aten.roll"),
    "flips": (flipped, lambda m: claim_rows(m, torch.ops.aten.flip.default), "aten.flip"),
    "attends both ways": (both_ways, lambda m: claim_reach(m, Reach.CAUSAL), "dot_product"),
    "attends both ways, by hand": (scores_both_ways, lambda m: claim_reach(m, Reach.CAUSAL), "aten.matmul"),
    "attends one row ahead": (one_ahead, lambda m: claim_reach(m, Reach.CAUSAL), "dot_product"),
    "attends to nine rows": (window_of_nine, lambda m: claim_reach(m, Reach.WINDOW, 8), "aten.matmul"),
}


@pytest.mark.parametrize(
    "marker", sample(WRONG, "flips", "attends one row ahead", "attends both ways, by hand")
)
def test_a_wrong_claim_is_contradicted(marker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The op and the line of the model are named, and nothing else is (but for the windowless layer)."""
    mixer, claim, op = WRONG[marker]
    claim(monkeypatch)
    found = small(mixing(mixer), plain(2, 67))
    assert not found.ok
    (probe,) = (p for p in found.contradicted if f"{HERE.name}:{line_of(marker)}:" in p.line)
    assert op in probe.op and len(probe.contradictions) > 1
    others = [p for p in found.contradicted if p is not probe]
    assert all("is_causal=True" in p.line for p in others) and (not others or "nine" in marker)
    text = str(found)
    assert "NOT CONFIRMED" in text and f"{HERE.name}:{line_of(marker)}" in text and op in text
    assert found.as_dict()["ok"] is False


def test_the_same_models_are_confirmed_by_an_honest_analysis() -> None:
    found = small(mixing(window_of_nine), plain(2, 67))
    assert found.ok and 9 in {p.window for p in found.probes}, str(found)


class DependsOnCalls(nn.Module):
    """An MLP whose result depends on how often it was called."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inner(x) * self.calls


@pytest.mark.slow
def test_both_steps_find_the_same_buffers() -> None:
    model = build("llama")
    model.model.layers[0].mlp = DependsOnCalls(model.model.layers[0].mlp)
    assert small(model, plain(2, 67)).ok
    assert int(model.model.layers[0].mlp.calls) == 0


def test_what_runs_whole_is_not_claimed() -> None:
    found = small(mixing(flipped), plain(2, 67))
    (entry,) = found.not_claimed
    assert found.ok and "flip" in entry.op and f"{HERE.name}:{line_of('flips')}" in entry.line
    assert "not claimed: aten.flip" in str(found) and not any("flip" in p.op for p in found.probes)


def test_a_step_that_fails_is_explained_by_what_was_contradicted(monkeypatch: pytest.MonkeyPatch) -> None:
    claim_rows(monkeypatch, torch.ops.aten.roll.default)
    break_the_streamed_step(monkeypatch)
    found = small(mixing(rolled), plain(2, 67))
    assert not found.ok and found.loss is None and "broken on purpose" in str(found)
    assert "aten.roll" in str(found) and "the streamed step failed" in found.verdict


def break_the_streamed_step(monkeypatch: pytest.MonkeyPatch, factor: float | None = None) -> None:
    """The compiled graph raises, or gives a loss that is wrong by a factor."""
    honest = verify_module.compile_graph

    def broken(*args: Any, **kwargs: Any) -> Any:
        run = honest(*args, **kwargs)

        def call(*inputs: Any) -> Any:
            if factor is None:
                raise RuntimeError("broken on purpose")
            return [v * factor for v in run(*inputs)]

        return call

    monkeypatch.setattr(verify_module, "compile_graph", broken)


def test_wrong_gradients_are_found_without_a_wrong_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    break_the_streamed_step(monkeypatch, 1 + 1e-5)
    model = mixing(rolled)
    found = small(model, plain(2, 67))
    assert not found.ok and not found.contradicted and not found.loss.ok
    assert len(found.different) == len(list(model.parameters()))
    assert found.worst.relative == pytest.approx(1e-5, rel=1e-3)
    assert "differs: head.weight" in str(found) and "loss or gradients differ" in found.verdict
    assert small(model, plain(2, 67), rtol=1e-4).ok


def test_a_gradient_on_one_side_only_is_a_difference() -> None:
    model = nn.Linear(2, 2)
    comparison = verify_module._Comparison({"weight": torch.ones(2, 2)}, 1e-4)
    with comparison.of(model):
        model.bias.sum().backward()
    checks = comparison.finish(model)
    assert [c.relative for c in checks] == pytest.approx([1.0, 2**0.5 / (1e-3 * 2)])
    assert [(c.parameter, c.ok) for c in checks] == [("weight", False), ("bias", False)]
    assert model.bias.grad is None


# -- the model is left as it was -------------------------------------------------------------------------


class Counting(nn.Module):
    """A layer with a buffer that every step changes."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def count(module: nn.Module, *_: Any) -> None:
    module.steps += 1


def state(model: Any) -> dict[str, Any]:
    return {
        "forward": vars(model).get("forward"),
        "modes": [m.training for m in model.modules()],
        "gradients": [p.grad for p in model.parameters()],
        "hooks": [list((p._post_accumulate_grad_hooks or {}).values()) for p in model.parameters()],
        "dropout": [model.config.attention_dropout, model.model.layers[0].self_attn.attention_dropout],
        "compiled": [m._compiled_call_impl for m in model.modules()],
        "buffers": [id(b) for b in model.buffers()],
    }


BEFORE = ["counting", "transformed", "compiled", "evaluating", "failing"]


@pytest.mark.parametrize("before", sample(BEFORE, "failing"))
def test_the_model_is_left_as_it_was(before: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama", attention_dropout=0.25)
    model.model.norm = Counting(model.model.norm)
    if before == "transformed":
        streambp_fx.transform(model, chunk=24, loss_chunk=LOSS_CHUNK)
    if before == "compiled":
        model.compile(backend="eager")
    if before == "failing":
        break_the_streamed_step(monkeypatch)
    if before == "counting":
        model.model.norm.register_forward_hook(count)
    model.model.layers[0].eval()
    model.train(before != "evaluating")
    stepped: list[str] = []
    first, second = list(model.parameters())[:2]
    first.grad = torch.ones_like(first)
    second.register_post_accumulate_grad_hook(lambda p: stepped.append("a step in the backward"))
    batch = plain(2, 67)
    known, kept = state(model), {k: v.clone() for k, v in batch.items()}
    weights, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    if before == "failing":
        with pytest.raises(RuntimeError, match="broken on purpose"):
            verify(model, batch)
    else:
        found = verify(model, batch)
        assert found.ok, str(found)
        assert found.chunk == (24 if before == "transformed" else 17)
        assert found.probes
        assert "attention_dropout = 0.25" in found.notes[0] and "dropout is off" in str(found)
    assert state(model) == known and not stepped
    assert torch.equal(first.grad, torch.ones_like(first))
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
    assert all(torch.equal(v, kept[k]) and v.grad is None for k, v in batch.items())
    assert all(not hasattr(v, "_dynamo_weak_dynamic_indices") for v in batch.values())


def test_noise_that_is_no_dropout_is_refused() -> None:
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn_like(x)  # noise

    with pytest.raises(VerificationError, match="randn_like") as refusal:
        small(mixing(noisy), plain(2, 67))
    assert f"{HERE.name}:{line_of('noise')}" in str(refusal.value)


# -- bad input -------------------------------------------------------------------------------------------

IDS = plain(2, 11)["input_ids"]
BAD: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "no batch": (None, {}, VerificationError, "must be a dict .* not NoneType"),
    "no labels": ({"input_ids": IDS}, {}, VerificationError, "no labels.*labels=input_ids"),
    "no tokens": ({"labels": IDS}, {}, VerificationError, "no input_ids.*it has labels"),
    "one token": ({"input_ids": IDS[:, :1], "labels": IDS[:, :1]}, {}, VerificationError, "two tokens"),
    "nothing to predict": (
        {"input_ids": IDS, "labels": torch.full_like(IDS, -100)}, {}, VerificationError, "loss is nan.*-100",
    ),
    "labels of another length": (
        {"input_ids": IDS, "labels": IDS[:, :9]}, {}, VerificationError, "own training step failed.*",
    ),
    "a token that is none": (
        {"input_ids": IDS + VOCAB, "labels": IDS}, {}, VerificationError, "own training step failed.*range",
    ),
    "an unknown option": ({"input_ids": IDS, "labels": IDS}, {"chnk": 3}, ValueError, "chnk.*chunk"),
    "a chunk of nothing": ({"input_ids": IDS, "labels": IDS}, {"chunk": 0}, ValueError, "chunk.*0"),
    "a row too far": ({"input_ids": IDS, "labels": IDS}, {"rows": [3, 10]}, ValueError, "rows .* 0 to 9"),
    "no rows": ({"input_ids": IDS, "labels": IDS}, {"rows": []}, ValueError, "rows"),
    "no tolerance": ({"input_ids": IDS, "labels": IDS}, {"rtol": 0}, ValueError, "rtol .* not 0"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str) -> None:
    batch, options, error, words = BAD[case]
    with pytest.raises(error, match=words):
        verify(build("llama"), batch, **options)


def test_a_model_without_trainable_parameters() -> None:
    with pytest.raises(VerificationError, match="no trainable parameter"):
        verify(build("llama").requires_grad_(False), plain(2, 11))


@pytest.mark.parametrize("what", [nn.Linear(4, 4), 3])
def test_not_a_causal_lm(what: Any) -> None:
    with pytest.raises(streambp_fx.CaptureError, match=r"takes no input_ids|not int"):
        verify(what, plain(2, 11))
    assert "forward" not in getattr(what, "__dict__", {})
