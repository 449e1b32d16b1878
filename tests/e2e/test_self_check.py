"""The self-check: it catches rules that are broken by hand, and leaves alone what is right."""

from __future__ import annotations

import copy
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from e2e_check import assert_close_grads, grads
from e2e_models import build, padded, plain, sample
from streambp_fx.passes import rules
from streambp_fx.passes.ir import Reach
from torch import Tensor, nn

import streambp_fx
from streambp_fx import StreamBPWarning
from streambp_fx.checking.result import SelfCheck
from streambp_fx.checking.sketch import sketch
from streambp_fx.runtime import head, streamed

aten = torch.ops.aten
OPTIONS = {"chunk": 8, "loss_chunk": 8}
VOCAB, WIDTH, HEADS = 31, 24, 3


@pytest.fixture(autouse=True)
def fresh() -> None:
    """Nothing that an earlier test compiled."""
    torch._dynamo.reset()


def module_of(name: str) -> Any:
    """A module of the compiler; some have the name of the function that they export."""
    return sys.modules[f"streambp_fx.passes.{name}"]


class Layer(nn.Module):
    """Attention by the kernel or by hand, then whatever a test wants to be streamed."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        if self.what in ("by hand", "one ahead"):
            i = torch.arange(x.shape[1])
            hidden = i[None, :] > i[:, None] + (self.what == "one ahead")
            weights = (q @ k.transpose(2, 3) * 0.3).masked_fill(hidden, float("-inf")).softmax(-1)
            read = weights @ v
        else:
            read = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(read.transpose(1, 2).flatten(2))
        if self.what == "flip":
            x = x + x.flip(1)
        if self.what == "softmax":
            x = x + x.softmax(1)
        if self.what == "cumsum":
            x = x + x.cumsum(1) * 0.1
        if self.what == "dropout":
            x = F.dropout(x, 0.3, self.training)
        if self.what == "noise":
            x = x + 0.1 * torch.randn_like(x)
        return x + self.narrow(F.gelu(self.wide(x)))


class Model(nn.Module):
    def __init__(self, what: str = "") -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(Layer(what) for _ in range(2))
        self.register_buffer("steps", torch.zeros(()))
        self.counts = what == "buffer"

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        if self.counts:
            self.steps.add_(1.0)
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=-100)


def make(what: str = "", dtype: torch.dtype = torch.float64) -> Model:
    torch.manual_seed(3)
    return Model(what).to(dtype)


def batch(rows: int = 33, samples: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(0, VOCAB, (samples, rows), generator=generator)
    labels = ids.roll(-1, 1)
    labels[:, :5] = -100
    return ids, labels


def step(call: Any, model: nn.Module, *inputs: Any) -> tuple[Tensor, dict[str, Any]]:
    model.zero_grad(set_to_none=True)
    loss = call(*inputs)
    loss.backward()
    return loss.detach(), grads(model)


def checked(model: nn.Module) -> SelfCheck:
    found = streambp_fx.schedule(model)
    assert found is not None and found.check is not None
    return found.check


# ---- rules that are broken by hand


def separable(op: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """A rule that says of an op that it keeps rows apart."""
    return lambda patch: patch.setitem(rules.RULES, op, lambda context, node: context.layout(node.args[0]))


def emitted(op: Any, change: Callable[[Tensor], Tensor]) -> Callable[[pytest.MonkeyPatch], None]:
    """An op that is written otherwise in chunk programs."""

    def broken(patch: pytest.MonkeyPatch) -> None:
        emit = module_of("chunk").EMIT
        own = emit.get(op) or (lambda run, node, role: run.call(node, role, None))
        patch.setitem(emit, op, lambda run, node, role: change(own(run, node, role)))

    return broken


def causal(patch: pytest.MonkeyPatch) -> None:
    """Every mask is said to be causal."""
    footprints = module_of("footprints")

    def claimed(facts: Any) -> Any:
        found = footprints.footprints(facts)
        for mixing in facts.mixings.values():
            if mixing.reach is Reach.FULL and mixing.mask is not None:
                mixing.reach = Reach.CAUSAL
        return found

    patch.setattr(streambp_fx.passes, "footprints", claimed)


def state_gradient(patch: pytest.MonkeyPatch) -> None:
    """What later rows give to earlier ones is lost."""
    attention = module_of("attention")

    def backward(ctx: Any, gradient: Tensor) -> tuple:
        return attention._as_result(ctx.own_gradient, ctx.dtype), None, None, None, None

    patch.setattr(attention.StateRead, "backward", staticmethod(backward))


def overwritten(patch: pytest.MonkeyPatch) -> None:
    """Memory is used again that somebody still reads."""
    lifetimes = module_of("reuse").Lifetimes
    patch.setattr(lifetimes, "ends", lambda self, value, reader: self.storage.get(value) in self.inside)


def sparse(patch: pytest.MonkeyPatch) -> None:
    """The gradient of the loss by its label is halved."""
    passes = module_of("sparse_gradients")
    own = passes._of_chosen

    def halved(program: Any, node: Any) -> Any:
        found = own(program, node)
        if found is None:
            return None
        values = program.insert(node, node, aten.mul.Tensor, found.values, 0.5)
        return passes.Sparse(found.dim, found.places, values)

    patch.setattr(passes, "_of_chosen", halved)


def a_row_less(patch: pytest.MonkeyPatch) -> None:
    """The last row of the last chunk is left out."""
    own = streamed.split_rows
    patch.setattr(
        streamed, "split_rows", lambda n, c: [*own(n, c)[:-1], (own(n, c)[-1][0], own(n, c)[-1][1] - 1)]
    )


def unscaled(patch: pytest.MonkeyPatch) -> None:
    """The head's coefficients are those of another loss."""
    own = head._coefficients
    patch.setattr(head, "_coefficients", lambda *given: (own(*given)[0] * 1.01, own(*given)[1]))


def twice(patch: pytest.MonkeyPatch) -> None:
    """A buffer is written twice."""
    from streambp_fx.runtime.written import WrittenInputs

    own = WrittenInputs.write

    def write(self: Any, inputs: Any, results: Any) -> Any:
        before = [inputs[k].clone() for k in self.positions]
        found = own(self, inputs, results)
        with torch.no_grad():
            for position, value in zip(self.positions, before, strict=True):
                inputs[position].add_(inputs[position] - value)
        return found

    patch.setattr(WrittenInputs, "write", write)


# What is broken: how, what the model has of it, the words of the warning.
BROKEN: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str, str]] = {
    "flip": (separable(aten.flip.default), "flip", "segment 1, aten.flip.default"),
    "softmax": (separable(aten.softmax.int), "softmax", "segment 1, aten.softmax.int"),
    "cumsum": (separable(aten.cumsum.default), "cumsum", "segment 1, aten.cumsum.default"),
    "mask": (causal, "one ahead", r"segment \d, aten.matmul.default"),
    "emit": (emitted(aten.gelu.default, lambda v: v * 1.001), "", "segment 1, aten.gelu.default"),
    "scale": (
        emitted(aten.scaled_dot_product_attention.default, lambda v: v * 1.001),
        "",
        "segment 1, aten.scaled_dot_product_attention.default",
    ),
    "state gradient": (state_gradient, "by hand", "segment 1"),
    "reuse": (overwritten, "", "segment 1"),
    "sparse gradients": (sparse, "", r"segment \d, aten.linear.default"),
    "rows": (a_row_less, "", "segment"),
    "coefficients": (unscaled, "", "every segment alone is right"),
    "buffer": (twice, "buffer", "every segment alone is right"),
    "dropped words": (emitted(aten.dropout.default, lambda v: v * 1.1), "dropout", "aten.dropout.default"),
}


@pytest.mark.parametrize("fault", sample(BROKEN, "flip", "mask", "emit", "state gradient", "reuse", "buffer"))
def test_a_broken_rule_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first result: the op is named, the step runs unstreamed, and is right."""
    broken, what, words = BROKEN[fault]
    model = make(what)
    eager = copy.deepcopy(model)
    broken(monkeypatch)
    call = torch.compile(model, backend="streambp", options=OPTIONS)
    with pytest.warns(StreamBPWarning) as said:
        torch.manual_seed(1)
        loss, found = step(call, model, *batch())
    text = [str(w.message) for w in said if "self-check" in str(w.message)]
    assert len(text) == 1 and "runs unstreamed" in text[0] and "report" in text[0]
    assert re.search(words, text[0]), text[0]
    assert checked(model).status == "differs" and "DIFFERS" in str(streambp_fx.schedule(model))
    torch.manual_seed(1)
    expected, wanted = step(eager, eager, *batch())
    assert torch.equal(loss, expected) and torch.equal(model.steps, eager.steps)
    assert_close_grads(found, wanted, 1e-12)


def test_without_the_check_it_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests above break does break gradients."""
    state_gradient(monkeypatch)
    model = make("by hand")
    eager = copy.deepcopy(model)
    call = torch.compile(model, backend="streambp", options={**OPTIONS, "check": "never"})
    _, found = step(call, model, *batch())
    _, wanted = step(eager, eager, *batch())
    with pytest.raises(AssertionError, match="gradients differ"):
        assert_close_grads(found, wanted, 1e-6)
    assert streambp_fx.schedule(model).check is None


def test_it_is_an_error_if_that_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    emitted(aten.gelu.default, lambda v: v * 1.001)(monkeypatch)
    call = torch.compile(make(), backend="streambp", options={**OPTIONS, "on_error": "raise"})
    with pytest.raises(streambp_fx.CompileError, match=r"segment 1, aten.gelu.default.*on_error"):
        call(*batch())


# ---- what is right


def test_nothing_is_disturbed() -> None:
    """Random state, gradients, buffers and hooks are as a step without the check leaves them."""
    fired: list[int] = []
    states = []
    for check in ("first", "never"):
        torch._dynamo.reset()
        model = make("noise")
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
            parameter.register_post_accumulate_grad_hook(lambda p: fired.append(1))
        torch.manual_seed(7)
        call = torch.compile(model, backend="streambp", options={**OPTIONS, "check": check})
        with pytest.warns(StreamBPWarning, match="unchunked"):
            loss = call(*batch())
        assert not fired and all(bool((p.grad == 1).all()) for p in model.parameters())
        states.append((torch.get_rng_state(), loss.detach()))
        assert (streambp_fx.schedule(model).check is None) is (check == "never")
    assert torch.equal(states[0][0], states[1][0]) and torch.equal(states[0][1], states[1][1])


def prompted(ignored: int) -> dict[str, Tensor]:
    """Labels only behind a long prompt."""
    found = plain(1, 60)
    found["labels"][:, :ignored] = -100
    return found


CASES = {
    "plain": lambda: plain(2, 33),
    "padded left": lambda: padded(33, "left"),
    "padded right": lambda: padded(67, "right"),
    "short": lambda: plain(3, 9),
    "a long prompt": lambda: {
        **plain(1, 60),
        "labels": plain(1, 60)["labels"].index_fill(1, torch.arange(57), -100),
    },
}
DTYPES = {"float64": 1e-5, "float32": 1e-4, "bfloat16": 0.1}


@pytest.mark.parametrize("case", sample(CASES, "padded left", "short", "a long prompt"))
@pytest.mark.parametrize("dtype", sample(DTYPES, "bfloat16"))
@pytest.mark.parametrize("family", sample(["llama", "gemma2", "gpt2", "bloom", "qwen3_tied"], "llama"))
def test_no_false_alarm(family: str, dtype: str, case: str) -> None:
    model = build(family, dtype=getattr(torch, dtype))
    streambp_fx.transform(model, **OPTIONS)
    with warnings.catch_warnings():
        warnings.simplefilter("error", StreamBPWarning)
        model(**CASES[case]()).loss.backward()
    found = checked(model)
    assert found.status == "agrees" and found.difference < DTYPES[dtype], str(found)
    assert found.rows == min(25, CASES[case]()["input_ids"].shape[1]), str(found)


def test_a_longer_sequence_is_checked_again() -> None:
    """A first sequence of a few rows shows little."""
    model = make()
    call = torch.compile(model, backend="streambp", options=OPTIONS)
    rows = []
    for length in (6, 7, 40, 50):
        call(*batch(length)).backward()
        rows.append(checked(model).rows)
    assert rows == [6, 6, 25, 25]


def test_sketches() -> None:
    """The norm of a difference is told from projections, of dense and of sparse tensors."""
    torch.manual_seed(0)
    a, b = torch.randn(700, 90), torch.randn(700, 90)
    far, near = sketch(a, 1).distance(sketch(a + b, 1)), sketch(a, 1).distance(sketch(a + 1e-4 * b, 1))
    assert 0.3 < far / float(b.norm()) < 3 and 0.3e-4 < near / float(b.norm()) < 3e-4
    assert sketch(a, 1).distance(sketch(a.clone(), 1)) == 0.0
    assert sketch(a[:3, :3], 1).exact and not sketch(a, 1).exact
    rows = torch.sparse_coo_tensor(torch.tensor([[3, 5, 3]]), b[:3], a.shape)
    assert sketch(rows, 1).sparse and sketch(rows, 1).distance(sketch(rows.to_dense(), 1)) < 1e-3
    nothing = torch.full_like(a, float("nan"))
    assert sketch(a, 1).distance(sketch(nothing, 1)) == float("inf")
