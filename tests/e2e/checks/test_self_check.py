"""The self-check: it catches rules that are broken by hand, and leaves alone what is right."""

from __future__ import annotations

import copy
import dataclasses
import importlib
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
from torch import Tensor, nn

import streambp_fx
from streambp_fx import StreamBPWarning
from streambp_fx.checking.gradient_sketch import sketch
from streambp_fx.checking.result import SelfCheck
from streambp_fx.passes import rules
from streambp_fx.passes.graph import kernel_settings
from streambp_fx.passes.graph.facts import Reach
from streambp_fx.passes.s4_trace import evaluation, prefix_attention
from streambp_fx.passes.step.instructions import BufferKind, Scale
from streambp_fx.runtime import lazy_tensors, padding
from streambp_fx.runtime.executor import Executor
from streambp_fx.runtime.segments import interpreter, loss_head, questions_to_data, segment_runner

aten = torch.ops.aten
OPTIONS = {"chunk": 8, "loss_chunk": 8}
VOCAB, WIDTH, HEADS = 31, 24, 3


@pytest.fixture(autouse=True)
def fresh() -> None:
    """Nothing that an earlier test compiled."""
    torch._dynamo.reset()


def module_of(name: str) -> Any:
    """A module of the compiler; some have the name of the function that they export."""
    return sys.modules[name]


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
        if self.what in ("by hand", "one ahead", "zeros"):
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
        if self.what == "dropout without gradients":
            h = self.out(x)
            with torch.no_grad():
                h = F.dropout(h, 0.3, self.training)
            x = x + self.narrow(self.wide(h))
        if self.what == "noise":
            x = x + 0.1 * torch.randn_like(x)
        return x + self.narrow(F.gelu(self.wide(x)))


class Model(nn.Module):
    def __init__(self, what: str = "") -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(Layer(what) for _ in range(2))
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("gain", torch.ones((), dtype=torch.bfloat16))
        self.counts, self.coarse = what == "buffer", what == "coarse"
        self.banned = what == "banned"
        if what == "zeros":
            for layer in self.layers:
                nn.init.zeros_(layer.out.weight)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        if self.counts:
            self.steps.add_(1.0)
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        if self.coarse:
            x = x * self.gain
        logits = self.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        if self.banned:
            return loss, logits.detach()[:, -1:].masked_fill(logits[:, -1:] > 0, float("-inf"))
        return loss


def make(what: str = "", dtype: torch.dtype = torch.float64) -> Model:
    torch.manual_seed(3)
    model = Model(what).to(dtype)
    model.gain = model.gain.to(torch.bfloat16)
    return model


def batch(rows: int = 33, samples: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(0, VOCAB, (samples, rows), generator=generator)
    labels = ids.roll(-1, 1)
    labels[:, :5] = -100
    return ids, labels


def step(call: Any, model: nn.Module, *inputs: Any) -> tuple[Tensor, dict[str, Any]]:
    model.zero_grad(set_to_none=True)
    found = call(*inputs)
    loss = found[0] if isinstance(found, tuple) else found
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
        emit = module_of("streambp_fx.passes.s4_trace.evaluation").EMIT
        own = emit.get(op) or (lambda run, node, role: run.call(node, role, None))
        patch.setitem(emit, op, lambda run, node, role: change(own(run, node, role)))

    return broken


def causal(patch: pytest.MonkeyPatch) -> None:
    """Every mask is said to be causal."""
    footprints = module_of("streambp_fx.passes.s2_prove.footprints")

    def claimed(facts: Any) -> Any:
        found = footprints.footprints(facts)
        for mixing in facts.mixings.values():
            if mixing.reach is Reach.FULL and mixing.mask is not None:
                mixing.reach = Reach.CAUSAL
        return found

    patch.setattr(streambp_fx.passes, "footprints", claimed)


def state_gradient(patch: pytest.MonkeyPatch) -> None:
    """What later rows give to earlier ones is lost."""
    attention = module_of("streambp_fx.passes.s4_trace.prefix_attention")

    def backward(ctx: Any, gradient: Tensor) -> tuple:
        return attention._as_result(ctx.own_gradient, ctx.dtype), None, None, None, None

    patch.setattr(attention.StateRead, "backward", staticmethod(backward))


def overwritten(patch: pytest.MonkeyPatch) -> None:
    """Memory is used again that somebody still reads."""
    storages = module_of("streambp_fx.passes.cost.storages").Storages
    ends = lambda self, value, reader: all(self.is_inside(k) for k in self.of[value])  # noqa: E731
    patch.setattr(storages, "ends", ends)


def sparse(patch: pytest.MonkeyPatch) -> None:
    """The gradient of the loss by its label is halved."""
    passes = module_of("streambp_fx.passes.s5_lower.sparse_gradients")
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
    own = segment_runner.split_rows

    def split(total: int, chunk: int, **how: int) -> list[tuple[int, int]]:
        *others, (start, rows) = own(total, chunk, **how)
        return [*others, (start, rows - 1)]

    patch.setattr(segment_runner, "split_rows", split)


def unscaled(patch: pytest.MonkeyPatch) -> None:
    """The head's coefficients are those of another loss."""
    own = loss_head._coefficients
    patch.setattr(loss_head, "_coefficients", lambda *given: (own(*given)[0] * 1.01, own(*given)[1]))


def parameter(patch: pytest.MonkeyPatch) -> None:
    """A parameter is written, with what is in it already."""
    own = Executor.__call__

    def call(self: Any, *inputs: Any, **rows: int) -> Any:
        with torch.no_grad():
            for value in inputs:
                if isinstance(value, Tensor) and value.requires_grad:
                    value.mul_(1.0)
        return own(self, *inputs, **rows)

    patch.setattr(Executor, "__call__", call)


def unfinished(patch: pytest.MonkeyPatch) -> None:
    """What the loss head has made is not multiplied by the gradient of the loss."""
    patch.setitem(interpreter.EXECUTE, Scale, lambda instruction, frame: None)


def pooled(patch: pytest.MonkeyPatch) -> None:
    """The memory of a sum of gradients is used again in the next step."""
    own, held = interpreter._new, {}

    def new(buffer: Any, frame: Any, *how: Any) -> Tensor:
        made = own(buffer, frame, *how)
        if buffer.kind is not BufferKind.SUM:
            return made
        return held.setdefault((id(frame.runner), made.shape, buffer), made).detach().zero_()

    patch.setattr(interpreter, "_new", new)


def remembered(patch: pytest.MonkeyPatch) -> None:
    """The head's coefficients are those of the first step of this length."""
    own, held = loss_head._coefficients, {}
    patch.setattr(loss_head, "_coefficients", lambda *given: held.setdefault(given[1].shape, own(*given)))


def twice(patch: pytest.MonkeyPatch) -> None:
    """A buffer is written twice."""
    from streambp_fx.runtime.written_inputs import WrittenInputs

    own = WrittenInputs.write

    def write(self: Any, inputs: Any, results: Any) -> Any:
        before = [inputs[k].clone() for k in self.positions]
        found = own(self, inputs, results)
        with torch.no_grad():
            for position, value in zip(self.positions, before, strict=True):
                inputs[position].add_(inputs[position] - value)
        return found

    patch.setattr(WrittenInputs, "write", write)


def of_one_size(size: Callable[[Any], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """What runs has the first batch or length baked in."""

    def broken(patch: pytest.MonkeyPatch) -> None:
        own, first = segment_runner.SegmentRunner.call, []

        def call(self: Any, kind: str, block: Any, step: Any, *given: Any) -> Any:
            values = own(self, kind, block, step, *given)
            first.append(size(step))
            other = kind == "joint" and size(step) != first[0]
            return [v * 1.1 if isinstance(v, Tensor) else v for v in values] if other else values

        patch.setattr(segment_runner.SegmentRunner, "call", call)

    return broken


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
    "beside a coarse dtype": (
        emitted(aten.gelu.default, lambda v: v * 1.0005),
        "coarse",
        "segment 1, aten.gelu.default",
    ),
    "parameter": (parameter, "", "every segment alone is right"),
    "unfinished": (unfinished, "", "every segment alone is right"),
    "pool": (pooled, "", "every segment alone is right"),
    "remembered": (remembered, "", "on other data|every segment alone is right"),
    "batch": (of_one_size(lambda step: step.sizes[step.batch]), "", "on other data|every segment alone"),
    "length": (of_one_size(lambda step: step.total), "", "on other data|every segment alone"),
    "zeros": (state_gradient, "zeros", "segment 1"),
    "beside what is not finite": (emitted(aten.gelu.default, lambda v: v * 1.001), "banned", "segment 1"),
    "buffer": (twice, "buffer", "every segment alone is right"),
    "dropped words": (emitted(aten.dropout.default, lambda v: v * 1.1), "dropout", "aten.dropout.default"),
}


@pytest.mark.parametrize("fault", sample(BROKEN, "flip", "emit", "reuse", "pool"))
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


# ---- kinds of steps


class Masked(nn.Module):
    """Attention under a mask of padding, a window or none; dropout and logits if they are asked for."""

    def __init__(self, what: str = "") -> None:
        super().__init__()
        self.model, self.what = Model(), what
        self.window = 30 if "window" in what else None

    def forward(self, ids: Tensor, labels: Tensor, mask: Tensor | None = None) -> Any:
        x = self.model.embedding(ids)
        i = torch.arange(ids.shape[1])
        seen = i[None, :] <= i[:, None]
        if self.window is not None:
            seen = seen & (i[None, :] > i[:, None] - self.window)
        if mask is not None:
            seen = seen[None, None] & mask[:, None, None, :]
        for layer in self.model.layers:
            q, k, v = (
                t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in layer.qkv(layer.norm(x)).chunk(3, -1)
            )
            read = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
            x = x + layer.out(read.transpose(1, 2).flatten(2))
            x = F.dropout(x, 0.3, "dropout" in self.what)
            x = x + layer.narrow(F.gelu(layer.wide(x)))
        logits = self.model.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        if "detach" in self.what:  # its gradient is not that of its value
            loss = loss * (1 + loss.detach())
        return (loss, logits) if "logits" in self.what else loss


def ragged(rows: int = 33, samples: int = 3, pad: int = 0, left: bool = False) -> tuple[Tensor, ...]:
    """Ids, labels and mask; each sample has `pad` more rows of padding than the one before."""
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(1, VOCAB, (samples, rows), generator=generator)
    labels, mask = ids.roll(-1, 1), torch.ones(samples, rows, dtype=torch.bool)
    for k in range(1, samples):
        own = slice(0, k * pad) if left else slice(rows - k * pad, rows)
        mask[k, own], labels[k, own] = False, -100
        if pad and not left:
            labels[k, rows - k * pad - 1] = -100  # nothing comes after the last token
    return ids, labels, mask


PLAIN, LEFT, RIGHT = ragged(), ragged(pad=4, left=True), ragged(pad=9)


def needed_too_short(by: int) -> Callable[[pytest.MonkeyPatch], None]:
    """Samples end so many rows before they do."""

    def too_short(patch: pytest.MonkeyPatch) -> None:
        own = padding.needed

        def broken(*given: Any) -> Any:
            found = own(*given)
            return None if found is None else tuple(max(0, n - by) for n in found)

        patch.setattr(padding, "needed", broken)

    return too_short


def parts(patch: pytest.MonkeyPatch) -> None:
    """What runs for some of the samples is wrong."""
    own = segment_runner.SegmentRunner.call

    def call(self: Any, kind: str, block: Any, *given: Any) -> Any:
        values = own(self, kind, block, *given)
        some = kind == "joint" and block.part is not None
        return [v * 1.1 if isinstance(v, Tensor) else v for v in values] if some else values

    patch.setattr(segment_runner.SegmentRunner, "call", call)


def always_plain(patch: pytest.MonkeyPatch) -> None:
    """No mask is said to hide more than later rows."""
    patch.setattr(questions_to_data.MaskQuestions, "plain", lambda self, asked: frozenset(self.known))


def plain_where_it_counts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        questions_to_data.MaskQuestions, "plain_where_it_counts", lambda self, asked: frozenset(self.known)
    )


# What is broken, and the batch that shows it; a batch without padding does not.
LATER = {
    "needed": (needed_too_short(9), RIGHT),
    "needed, less than a chunk": (needed_too_short(6), RIGHT),
    "parts": (parts, RIGHT),
    "plain": (always_plain, LEFT),
    "plain where it counts": (plain_where_it_counts, LEFT),
    "plain, all labels": (always_plain, (*PLAIN[:2], LEFT[2])),
    "plain, one sample": (always_plain, (*PLAIN[:2], LEFT[2].roll(1, 0))),
}


@pytest.mark.parametrize("fault", sample(LATER, "needed, less than a chunk", "plain, all labels"))
def test_a_later_kind_of_step_is_checked_before_its_first_result(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, later = LATER[fault]
    torch.manual_seed(3)
    model = Masked().double()
    eager = copy.deepcopy(model)
    broken(monkeypatch)
    call = torch.compile(model, backend="streambp", options=OPTIONS)
    with warnings.catch_warnings():
        warnings.simplefilter("error", StreamBPWarning)
        step(call, model, *PLAIN)
    assert checked(model).status == "agrees"
    with pytest.warns(StreamBPWarning, match="self-check"):
        loss, found = step(call, model, *later)
    assert checked(model).status == "differs"
    expected, wanted = step(eager, eager, *later)
    assert torch.equal(loss, expected)
    assert_close_grads(found, wanted, 1e-12)


def lazy_gradient(patch: pytest.MonkeyPatch) -> None:
    own = lazy_tensors.LazyOutput.backward
    patch.setattr(lazy_tensors.LazyOutput, "backward", staticmethod(lambda ctx, g: own(ctx, g * 1.05)))


def other_seed(patch: pytest.MonkeyPatch) -> None:
    """The backward drops something else than the forward."""
    own = segment_runner.SegmentRunner.call

    def call(self: Any, kind: str, block: Any, step: Any, *given: Any) -> Any:
        step = dataclasses.replace(step, seed=step.seed + 1) if kind == "joint" else step
        return own(self, kind, block, step, *given)

    patch.setattr(segment_runner.SegmentRunner, "call", call)


def nothing_dropped(patch: pytest.MonkeyPatch) -> None:
    """The gradient is that of the loss, but there is no dropout in it."""
    patch.setattr(evaluation.Evaluation, "dropout", lambda self, node, value, probability: value * 1)


def drops_more(patch: pytest.MonkeyPatch) -> None:
    own = evaluation.Evaluation.dropout
    patch.setattr(evaluation.Evaluation, "dropout", lambda self, n, v, p: own(self, n, v, min(0.9, 1.2 * p)))


def not_divided(patch: pytest.MonkeyPatch) -> None:
    """What is not dropped is as large as it was."""
    patch.setattr(Tensor, "div_", lambda self, other: self)


def one_seed(patch: pytest.MonkeyPatch) -> None:
    """All layers drop the same."""
    own = segment_runner.SegmentRunner.numbers

    def numbers(self: Any, extent: Any, seed: int, step: Any) -> list[Any]:
        return own(self, extent, seed - (self.segment.index << 32), step)

    patch.setattr(segment_runner.SegmentRunner, "numbers", numbers)


def no_seed(patch: pytest.MonkeyPatch) -> None:
    """What a chunk drops does not depend on the seed it gets."""
    patch.setattr(prefix_attention, "seeded_generator", lambda device, seed: torch.Generator().manual_seed(1))


def window_too_short(patch: pytest.MonkeyPatch) -> None:
    """A window of 30 reads a column less."""
    own = segment_runner.SegmentRunner.extents_of

    def extents(self: Any, *given: Any) -> Any:
        return [
            dataclasses.replace(e, prefix=e.prefix - 1, low=e.low + 1) if e.low > 0 and e.prefix else e
            for e in own(self, *given)
        ]

    patch.setattr(segment_runner.SegmentRunner, "extents_of", extents)


def single_rows(patch: pytest.MonkeyPatch) -> None:
    own = segment_runner.SegmentRunner.call

    def call(self: Any, kind: str, block: Any, *given: Any) -> Any:
        values = own(self, kind, block, *given)
        alone = kind in ("joint", "loss") and block.extent.rows == 1
        return [v * 1.1 if isinstance(v, Tensor) else v for v in values] if alone else values

    patch.setattr(segment_runner.SegmentRunner, "call", call)


# What is broken, of which model, on how many rows, with which options, the words of the warning.
MISSED = {
    "lazy": (lazy_gradient, "logits", 33, {}, "the self-check"),
    "dropout": (other_seed, "dropout", 33, {}, "with dropout, the gradient is not that of the loss"),
    "no dropout": (nothing_dropped, "dropout", 33, {}, "with dropout, steps are the same whatever they draw"),
    "another probability": (drops_more, "dropout", 33, {}, "of which there is none in the graph"),
    "not divided": (not_divided, "dropout", 33, {}, "is not divided by the probability of that"),
    "one seed": (one_seed, "dropout", 33, {}, "two draws of one forward have one seed"),
    "no seed": (no_seed, "dropout", 33, {}, "two draws with other seeds are the same"),
    "window": (window_too_short, "window", 70, {}, "on 39 rows"),
    "rows": (single_rows, "", 33, {"chunk": 1, "loss_chunk": 1}, "chunk 1"),
}


@pytest.mark.parametrize("dtype", sample([torch.float64, torch.float32], torch.float32))
@pytest.mark.parametrize("fault", sample(MISSED, "lazy", "one seed"))
def test_what_only_some_models_have_is_checked(
    fault: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, what, rows, options, words = MISSED[fault]
    torch.manual_seed(3)
    model = Masked(what).to(dtype)
    broken(monkeypatch)
    call = torch.compile(model, backend="streambp", options={**OPTIONS, **options})
    with pytest.warns(StreamBPWarning, match=words):
        call(*ragged(rows)[:2])
    assert checked(model).status == "differs"


# ---- what is right


IN_TURN = [PLAIN, LEFT, RIGHT, ragged(60), ragged(50, 5, 8), ragged(50, 4, 3, left=True), RIGHT, LEFT]


@pytest.mark.parametrize(
    "what", sample(["", "logits", "dropout", "window", "dropout window logits"], "dropout")
)
@pytest.mark.parametrize("dtype", sample([torch.float64, torch.float32, torch.bfloat16], torch.float32))
@pytest.mark.parametrize("chunk", sample([1, 8, 1024], 8))
def test_steps_of_all_kinds_in_turn(
    what: str, dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No alarm; one check for each kind; a short step of every kind is found."""
    from streambp_fx import backend

    kinds, own = [], backend.self_check

    def counted(*given: Any) -> SelfCheck:
        kinds.append(given[3])
        return own(*given)

    monkeypatch.setattr(backend, "self_check", counted)
    torch.manual_seed(3)
    model = Masked(what).to(dtype)
    call = torch.compile(model, backend="streambp", options={"chunk": chunk, "loss_chunk": chunk})
    with warnings.catch_warnings():
        warnings.simplefilter("error", StreamBPWarning)
        for batch in IN_TURN:
            found = call(*batch)
            (found if isinstance(found, Tensor) else found[0]).backward()
    found = checked(model)
    assert found.ok and len({(k, k.flags) for k in kinds}) == len(kinds) <= 6
    text = str(found)
    assert "differs" not in text and "no short step is of that kind" not in text, text


class Probabilities(Model):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return F.binary_cross_entropy(
            self.head(x).sigmoid(), F.one_hot(labels.clamp_min(0), VOCAB).to(x.dtype)
        )


def test_an_op_that_checks_its_values_is_given_such_as_it_takes() -> None:
    """NaN is no probability: the trial of its rows would be an error, or end the process on a GPU."""
    torch.manual_seed(3)
    model = Probabilities().double()
    with warnings.catch_warnings():
        warnings.simplefilter("error", StreamBPWarning)
        torch.compile(model, backend="streambp", options=OPTIONS)(*batch())
    found = checked(model)
    assert found.ok and all(segment.chunked for segment in streambp_fx.schedule(model).segments)


class OtherOrder(Model):
    """Targets of shape (rows, batch), flattened beside logits of (batch, rows)."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).reshape(-1, VOCAB), labels.reshape(-1))


def test_targets_in_another_order_than_the_rows() -> None:
    """A chunk takes those beside its logits, and so does the trial of its rows."""
    torch.manual_seed(3)
    model = OtherOrder().double()
    ids, labels = batch()
    eager = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", StreamBPWarning)
        step = torch.compile(model, backend="streambp", options=OPTIONS)
        step(ids, labels.t().contiguous()).backward()
    eager(ids, labels.t().contiguous()).backward()
    assert_close_grads(grads(model), grads(eager), 1e-9)
    found = checked(model)
    assert found.ok and all(segment.chunked for segment in streambp_fx.schedule(model).segments)


@pytest.mark.parametrize("logits", sample(["keep", "drop"], "keep"))
def test_logits_that_are_not_lazy(logits: str) -> None:
    """No gradient is asked of what is dropped."""
    model = Masked("logits").double()
    call = torch.compile(model, backend="streambp", options={**OPTIONS, "logits": logits})
    with warnings.catch_warnings():
        warnings.simplefilter("error", StreamBPWarning)
        call(*PLAIN)[0].backward()
    assert checked(model).status == "agrees"


def test_the_schedule_names_other_kinds() -> None:
    torch.manual_seed(3)
    model = Masked().double()
    call = torch.compile(model, backend="streambp", options=OPTIONS)
    for batch in (PLAIN, LEFT, RIGHT, PLAIN):
        call(*batch)
    text = str(streambp_fx.schedule(model))
    assert text.count("checked against the uncompiled graph") == 1
    assert "checked as well: steps with masks in use, rows that see nothing: agrees" in text
    assert "checked as well: steps with rows left out: agrees" in text


def test_rows_that_see_nothing_make_a_kind_of_their_own() -> None:
    """A mask that hides something from every row has been checked; then one leaves some rows nothing."""
    model = Masked().double()
    call = torch.compile(model, backend="streambp", options=OPTIONS)
    texts = []
    for start in (5, 0, 5):
        ids, labels, mask = ragged()
        mask[1, start : start + 3] = False
        call(ids, labels, mask)
        texts.append(str(streambp_fx.schedule(model)))
    assert "as well" not in texts[0] and texts[1] == texts[2]
    assert "checked as well: steps with masks in use, rows that see nothing: agrees" in texts[1]


@pytest.mark.slow
def test_what_dropout_draws_is_not_judged_where_nothing_can_be_told() -> None:
    """In half precision, and where the gradient is not meant to be that of the loss."""
    for what, dtype, words in (
        ("dropout", torch.bfloat16, "half precision"),
        ("dropout detach", torch.float64, "the gradient of the graph itself is not that of its loss"),
    ):
        torch._dynamo.reset()
        model = Masked(what).to(dtype)
        torch.compile(model, backend="streambp", options=OPTIONS)(*PLAIN[:2])
        assert checked(model).status == "agrees"
        assert any(words in text for text in checked(model).left_out)


def test_a_failed_check_leaves_the_random_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model that runs unstreamed then draws what it would have drawn."""
    other_seed(monkeypatch)
    torch.manual_seed(3)
    model = Masked("dropout").double()
    torch.manual_seed(5)
    expected = model(*PLAIN)
    call = torch.compile(model, backend="streambp", options=OPTIONS)
    torch.manual_seed(5)
    with pytest.warns(StreamBPWarning, match="self-check"):
        assert torch.equal(call(*PLAIN), expected)


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


@pytest.mark.parametrize("case", sample(CASES, "padded left"))
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
    more = family == "gemma2" or (found.kind is not None and found.kind.left_out)  # than its window
    wanted = 25 if more else 17
    assert found.rows == min(wanted, CASES[case]()["input_ids"].shape[1]), str(found)


@pytest.mark.parametrize("call", sample(["transform", "compile"], "transform"))
def test_a_dropout_without_gradients_is_no_difference(call: str) -> None:
    """Within the check it drops nothing, and gives nothing a gradient all the same."""
    model = make("dropout without gradients")
    run: Any = model
    if call == "transform":
        streambp_fx.transform(model, seq_dim={"ids": 1, "labels": 1}, **OPTIONS)
    else:
        run = torch.compile(model, backend="streambp", options=OPTIONS)
    with warnings.catch_warnings():
        warnings.simplefilter("error", StreamBPWarning)
        run(*batch()).backward()
    assert checked(model).status == "agrees", str(checked(model))


class Drops(nn.Module):
    """Dropout before attention, after it, and before the head."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.model, self.causal = Model(), causal

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        x = F.dropout(self.model.embedding(ids), 0.1)
        for layer in self.model.layers:
            q, k, v = (
                t.unflatten(-1, (HEADS, -1)).transpose(1, 2)
                for t in layer.qkv(F.dropout(layer.norm(x), 0.3)).chunk(3, -1)
            )
            read = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
            x = x + F.dropout(layer.out(read.transpose(1, 2).flatten(2)), 0.2)
        logits = self.model.head(F.dropout(x, 0.2))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


@pytest.mark.parametrize("option", sample([{}, {"order": "chunks"}, {"save": "attention"}, {"every": 2}], {}))
@pytest.mark.parametrize("logits", sample(["drop", "keep"], "drop"))
@pytest.mark.parametrize("causal", [True, False])
def test_draws_that_are_made_twice(causal: bool, logits: str, option: dict[str, Any]) -> None:
    """Attention that is not causal: states are made before the chunks run, and so is what is before them."""
    torch.manual_seed(3)
    model = Drops(causal).double()
    call = torch.compile(model, backend="streambp", options={**OPTIONS, **option, "logits": logits})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StreamBPWarning)  # chunks first change nothing where it is not causal
        call(*batch())[0].backward()
    assert checked(model).status == "agrees", str(checked(model))


def test_a_longer_sequence_is_checked_again() -> None:
    """A first sequence of a few rows shows little."""
    model = make()
    call = torch.compile(model, backend="streambp", options=OPTIONS)
    rows = []
    for length in (6, 7, 40, 50):
        call(*batch(length)).backward()
        rows.append(checked(model).rows)
    assert rows == [6, 6, 17, 17]


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


@pytest.mark.slow
@pytest.mark.parametrize("autocast", sample([False, True], True))
@pytest.mark.parametrize("side", sample(["right", "left"], "left"))
def test_as_on_a_gpu(side: str, autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the streamed step is compared with has attention by products, in layouts that views rely on."""
    for name in ("checking.self_check", "probing.probe"):
        module = importlib.import_module(f"streambp_fx.{name}")
        monkeypatch.setattr(module, "plain_attention", lambda inputs: kernel_settings._PlainAttention())
    model = streambp_fx.transform(build("llama", dtype=torch.float32), **OPTIONS)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(**padded(67, side, (29, 0))).loss
    loss.backward()
    found = streambp_fx.schedule(model)
    assert found is not None and found.check is not None and found.check.status == "agrees", found.check
    assert all(s.chunked for s in found.segments)
