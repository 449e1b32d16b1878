"""Samples of very different lengths in one batch: exact, and rows that the loss does not read are not run."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from e2e_check import assert_close_grads, check_exact, grads, in_double, step, transform
from e2e_models import CHUNK, FAMILIES, LOSS_CHUNK, VOCAB, build, sample
from torch.utils._python_dispatch import TorchDispatchMode

import streambp_fx
from streambp_fx.passes.s2_prove.independent_samples import Samples, batch, batch_size
from streambp_fx.passes.s6_schedule.step_parts import StepParts
from streambp_fx.runtime.segments.segment_runner import SegmentRunner
from streambp_fx.runtime.segments.step_blocks import SampleRange, runs

aten = torch.ops.aten
LENGTH = 67


def ragged(lengths: Sequence[int], side: str = "right", total: int = LENGTH) -> dict[str, torch.Tensor]:
    """A padded batch whose padding has no labels."""
    generator = torch.Generator().manual_seed(sum(lengths))
    ids = torch.randint(3, VOCAB, (len(lengths), total), generator=generator)
    positions = torch.arange(total)
    if side == "left":
        positions = total - 1 - positions
    mask = (positions < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def with_a_hole() -> dict[str, torch.Tensor]:
    """Tokens that nobody sees, before others that count."""
    batch = ragged((40, 67))
    batch["attention_mask"][0, 11:19] = 0
    return batch


def with_labels_everywhere() -> dict[str, torch.Tensor]:
    """The loss reads padding as well."""
    batch = ragged((40, 67))
    return {**batch, "labels": batch["input_ids"]}


BATCHES = {
    "long, short, shorter": ragged((67, 20, 5)),
    "short, long, short": ragged((5, 67, 20)),
    "all short": ragged((20, 5)),
    "taking turns": ragged((5, 30, 5, 30)),
    "one sample": ragged((20,)),
    "left": ragged((30, 67, 9), "left"),
    "as many as tokens": ragged((9, 17, *(3,) * 15), total=17),
    "full": ragged((67, 67)),
    "a hole": with_a_hole(),
    "labels everywhere": with_labels_everywhere(),
}
PLAIN = {name: name not in ("left", "a hole", "labels everywhere") for name in BATCHES}


@pytest.fixture
def rows_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter]:
    """Rows of samples that programs were called for, by kind of program."""
    found: Counter = Counter()
    original = SegmentRunner.call

    def call(self: SegmentRunner, kind: str, block: Any, step: Any, *given: Any) -> list[Any]:
        samples = step.sizes.get(step.batch, 1) if block.part is None else block.part.count
        found[kind] += samples * block.extent.rows
        return original(self, kind, block, step, *given)

    monkeypatch.setattr(SegmentRunner, "call", call)
    yield found


@pytest.mark.parametrize("family", sample(FAMILIES, "llama"))
def test_exact(family: str) -> None:
    check_exact(functools.partial(build, family), BATCHES)


POLICIES: dict[str, dict[str, Any]] = {
    "attention": {"save": "attention"},
    "attention, every 2": {"save": "attention", "every": 2},
    "disk": {"offload": "disk"},
}


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_exact_with_policies(policy: str) -> None:
    check_exact(functools.partial(build, "llama", num_hidden_layers=3), BATCHES, **POLICIES[policy])


def up(length: int, chunk: int) -> int:
    return min(LENGTH, -(-length // chunk) * chunk)


def test_what_is_not_run(rows_run: Counter) -> None:
    """Layers run to the chunk in which a sample ends, the head the chunks that have labels."""
    model = transform(build("llama"), chunk=CHUNK, loss_chunk=LOSS_CHUNK, check="never")
    layers = len(model.model.layers)
    for lengths in ((67, 20, 5), (5, 67, 20), (5, 30, 5, 30), (20, 5), (20,)):
        rows_run.clear()
        model(**ragged(lengths)).loss.backward()
        least = sum(lengths)
        # chunks are even, so they are a little shorter than asked for
        most = sum(up(up(n, LOSS_CHUNK) + 1, CHUNK) for n in lengths)
        for kind in ("forward", "states", "joint"):
            assert layers * least <= rows_run[kind] <= layers * most, (lengths, kind, rows_run)
        assert least - len(lengths) <= rows_run["loss"] <= sum(up(n, LOSS_CHUNK) + 1 for n in lengths)


@pytest.mark.slow
def test_padding_at_random(rows_run: Counter) -> None:
    """A model that draws random numbers runs all samples together, as far as the longest."""
    model = transform(build("gpt2", resid_pdrop=0.1), check="never")
    model(**ragged((20, 5))).loss.backward()
    assert 20 <= rows_run["joint"] / (2 * 2) < 40
    assert "random" in streambp_fx.schedule(model).executor.parts.samples_together


@pytest.mark.slow
def test_labels_alone_decide(rows_run: Counter) -> None:
    """Tokens without a label behind the last one with a label are seen by no row that counts."""
    eager = build("llama")
    model = transform(copy.deepcopy(eager), check="never")
    batch = ragged((67, 67))
    batch["labels"][1, 10:] = -100
    del batch["attention_mask"]
    want, got = step(eager, batch), step(model, batch)
    assert_close_grads(got[1], want[1], 1e-5)
    assert rows_run["joint"] < 2 * (LENGTH + 2 * CHUNK + 1)


# ---- masks


@pytest.fixture
def masked(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[bool]]:
    """Whether layers were run with a mask."""
    found: set[bool] = set()
    original = SegmentRunner.call

    def call(self: SegmentRunner, kind: str, block: Any, step: Any, *given: Any) -> list[Any]:
        if self.masks:
            found.add(not step.plain.issuperset(self.masks))
        return original(self, kind, block, step, *given)

    monkeypatch.setattr(SegmentRunner, "call", call)
    yield found


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"logits": "lazy"}, marks=pytest.mark.slow)], ids=["no logits", "logits"]
)
@pytest.mark.slow
def test_a_mask_of_padding_behind_what_counts_is_not_needed(
    options: dict[str, Any], masked: set[bool]
) -> None:
    """Gradients are compared in `test_exact`. Where logits may be read, only if rows are left out anyway."""
    model = transform(build("llama"), check="never", **options)  # which runs masks of its own
    for name, given in BATCHES.items():
        masked.clear()
        model(**given).loss.backward()
        assert masked == {not PLAIN[name]}, name
    masked.clear()
    model(**ragged((66, 67))).loss.backward()
    assert masked == {bool(options)}


@pytest.mark.slow
def test_a_mask_is_needed_where_samples_are_not_known_to_be_independent(
    masked: set[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepParts, "dependent_samples", "nobody knows")
    model = transform(build("llama"))
    model(**ragged((66, 40))).loss.backward()
    assert masked == {True}
    masked.clear()
    model(**ragged((40,))).loss.backward()
    assert masked == {False}, "a sample alone"


# ---- logits


@pytest.fixture
def both() -> tuple[Any, Any, dict[str, torch.Tensor]]:
    with in_double(lambda: build("llama")):
        eager = build("llama").double()
    model = torch.compile(copy.deepcopy(eager), backend="streambp", options={"chunk": 16, "loss_chunk": 8})
    return eager, model, ragged((5, 67, 25))  # the last one ends where a chunk does


@pytest.mark.slow
def test_logits_that_are_read_are_complete(both: Any) -> None:
    """Those of padding as well, before and after the backward."""
    eager, model, batch = both
    want = eager(**batch).logits
    output = model(**batch)
    output.loss.backward()
    torch.testing.assert_close(output.logits.detach(), want, check_dtype=False, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_logits_that_are_differentiated(both: Any) -> None:
    eager, model, batch = both
    keep = batch["attention_mask"][..., None]

    def total(output: Any) -> torch.Tensor:
        return output.loss + (output.logits.tanh() * keep).sum() * 0.01

    total(eager(**batch)).backward()
    total(model(**batch)).backward()
    assert_close_grads(grads(model._orig_mod), grads(eager), 1e-6)


@pytest.mark.slow
def test_gradient_of_padding_is_refused(both: Any) -> None:
    """Never a gradient that is silently missing."""
    _, model, batch = both
    output = model(**batch)
    with pytest.raises(RuntimeError, match=r"logits of padding.*\{.logits.: .keep.\}"):
        (output.loss + output.logits.square().sum()).backward()


@pytest.mark.slow
def test_with_logits_kept_all_is_run(rows_run: Counter) -> None:
    eager = build("llama")
    options = {"chunk": 16, "loss_chunk": 8, "logits": "keep"}
    model = torch.compile(copy.deepcopy(eager), backend="streambp", options=options)
    batch = ragged((5, 67))
    for m in (eager, model):
        output = m(**batch)
        (output.loss + output.logits.square().sum() * 0.01).backward()
    assert_close_grads(grads(model._orig_mod), grads(eager), 1e-5)
    assert rows_run["joint"] >= 2 * 2 * LENGTH


# ---- the proof


def test_runs() -> None:
    flags = [True, True, False, True, False, False]
    assert list(runs(flags)) == [SampleRange(0, 2), SampleRange(3, 1)]
    assert list(runs(flags, False)) == [SampleRange(2, 1), SampleRange(4, 2)]
    assert list(runs([])) == [] and list(runs([True])) == [SampleRange(0, 1)]


class Mixed(torch.nn.Module):
    """Attention, and then something that one sample knows of the others (or not)."""

    def __init__(self, mix: Any) -> None:
        super().__init__()
        self.mix = mix
        self.qkv = torch.nn.Linear(8, 24)
        self.head = torch.nn.Linear(8, 11)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        x = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = self.mix(x)
        loss = torch.nn.functional.cross_entropy(self.head(x).transpose(1, 2), labels)
        return loss


def reordered(x: torch.Tensor) -> torch.Tensor:
    """Tokens and samples merged in the other order, and apart again: the same values."""
    return x.transpose(0, 1).flatten(0, 1).unflatten(0, (x.shape[1], -1)).transpose(0, 1)


def multiplied(x: torch.Tensor) -> torch.Tensor:
    """Scores of each sample against all samples, at the same token."""
    scores = x.transpose(0, 1) @ x.permute(1, 2, 0)
    return x + scores.transpose(0, 1).mean(-1, keepdim=True)


def convolved(x: torch.Tensor) -> torch.Tensor:
    """A convolution along the samples: each is given those before it, at the same token."""
    samples = torch.nn.functional.pad(x.permute(1, 2, 0), (2, 0))
    return x + torch.nn.functional.conv1d(samples, torch.ones(8, 8, 3, dtype=x.dtype)).permute(2, 0, 1)


def weighed(x: torch.Tensor) -> torch.Tensor:
    """Attention of each sample to all samples, at the same token."""
    tokens = x.transpose(0, 1)
    return x + ((tokens @ tokens.mT).softmax(-1) @ tokens).transpose(0, 1)


# How samples are mixed, and whether they are independent of each other (None: not known, or not proved).
MIXES = {
    "scaled": (lambda x: x * 2 + x.mean(-1, keepdim=True), True),
    "a mean over samples": (lambda x: x - x.mean(0, keepdim=True), False),
    "turned around": (lambda x: x + x.flip(0), False),
    "shifted": (lambda x: x + x.roll(1, 0), False),
    "the first": (lambda x: x + x[0], False),
    "normalised over samples": (lambda x: x.softmax(0), False),
    "counted": (lambda x: x / x.shape[0], False),
    "numbered": (lambda x: x + torch.arange(x.shape[0])[:, None, None], None),
    "the other order": (reordered, None),
    "multiplied with the others": (multiplied, False),
    "convolved with those before": (convolved, False),
    "weighed by the others": (weighed, False),
}


@pytest.mark.parametrize("name", sample(MIXES, "the first", "weighed by the others"))
def test_samples_that_see_each_other(name: str, rows_run: Counter) -> None:
    """What is not proved is run together; the gradient is right in any case."""
    mix, independent = MIXES[name]
    torch._dynamo.reset()
    eager = Mixed(mix).double()
    model = copy.deepcopy(eager)
    options = {"chunk": 8, "loss_chunk": 8, "seq_dim": {"x": 1, "labels": 1}}
    call = torch.compile(model, backend="streambp", options=options)
    for lengths in ((40, 9, 5), (9, 40, 3, 20)):
        x = torch.randn(len(lengths), 40, 8, dtype=torch.float64)
        labels = torch.randint(0, 11, (len(lengths), 40))
        labels[torch.arange(40) >= torch.tensor(lengths)[:, None]] = -100
        for m, function in ((eager, eager), (model, call)):
            m.zero_grad()
            function(x, labels).backward()
        assert_close_grads(grads(model), grads(eager), 1e-9)
    if independent is not None:
        less = rows_run["states"] < (3 + 4) * 40
        assert less == independent, rows_run


def test_the_proof_names_the_op() -> None:
    model = torch.compile(Mixed(MIXES["turned around"][0]), backend="streambp")
    model(torch.randn(3, 40, 8), torch.randint(0, 11, (3, 40))).backward()
    facts = streambp_fx.schedule(model).facts
    size = batch_size(facts)
    assert size is not None
    found = [batch(facts, s, size) for s in facts.segments if s.chunked]
    reasons = [f for f in found if isinstance(f, str)]
    assert any(isinstance(f, Samples) for f in found) or reasons
    assert any("flip" in r and "test_ragged.py" in r for r in reasons), reasons


READS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default}


class HostReads(TorchDispatchMode):
    """Ops that the host must wait for, if they run on a GPU."""

    only_observes = True

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


ASKED = [(kind, how) for kind in ("long, short, shorter", "left", "full") for how in ("sdpa", "eager")]


@pytest.mark.parametrize(("kind", "attention"), sample(ASKED))
def test_a_step_waits_for_the_device_once(kind: str, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding, rows that see nothing and rows without a part in the loss are read together.

    With two masks, of which one has a window; the first step compiles, which may read what it likes.
    """
    model = transform(build("gemma3_text", attention))
    inputs = {k: v for k, v in BATCHES[kind].items() if kind != "full" or k != "attention_mask"}
    step(model, inputs)
    reads = HostReads()
    original = torch.Tensor.tolist
    tolist = lambda value: (reads.found.append("tolist"), original(value))[1]  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "tolist", tolist)
    with reads:
        step(model, inputs)
    assert reads.found == ["tolist"]


class Numbered(torch.nn.Module):
    """A causal LM with trained values for each place in the batch: among rows, in a layer, in the head."""

    def __init__(self) -> None:
        super().__init__()
        linear = functools.partial(torch.nn.Linear, 8, 8)
        self.embed, self.first, self.second, self.mix = (
            torch.nn.Embedding(11, 8),
            linear(),
            linear(),
            linear(),
        )
        self.head, self.of_sample = torch.nn.Linear(8, 11), torch.nn.Parameter(torch.rand(3, 6, 8) + 0.5)
        self.double()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        early, middle, late = self.of_sample[:, torch.arange(input_ids.shape[0])].unsqueeze(2)
        x = self.embed(input_ids)
        x = (x + self.second(self.first(x).sin())) * early
        q = self.mix(x).unsqueeze(1)
        y = torch.nn.functional.scaled_dot_product_attention(q, q, q * middle.unsqueeze(1), is_causal=True)
        logits = self.head((x + y.squeeze(1)) * late)
        targets = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.slow
def test_values_of_samples_have_their_own_gradients(rows_run: Counter) -> None:
    """A sum over the chunks of some samples goes to those alone."""
    torch.manual_seed(0)
    eager = Numbered()
    model = transform(copy.deepcopy(eager), check="never")
    for lengths in ((40, 9, 5), (9, 40, 3, 20), (12, 30)):
        ids = torch.randint(0, 11, (len(lengths), 40))
        labels = ids.where(torch.arange(40) < torch.tensor(lengths)[:, None], -100)
        rows_run.clear()
        for m in (eager, model):
            m.zero_grad()
            m(ids, labels).backward()
        assert_close_grads(grads(model), grads(eager), 1e-10)
        assert rows_run["loss"] < len(lengths) * 40, "samples end where they do"
