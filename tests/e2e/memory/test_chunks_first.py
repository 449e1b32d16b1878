"""Each chunk goes through all layers before the next one does: exact, as predicted, and small."""

from __future__ import annotations

import copy
import functools
import itertools
import warnings
from typing import Any

import pytest
import torch
from e2e_check import assert_all_chunked, check_exact, compare, in_double, step, transform
from e2e_memory import BATCHES, live
from e2e_models import DEVICE, build, perturb, plain, sample, true_double
from peft import LoraConfig, get_peft_model
from test_architectures import batch, model_of
from test_saving import ARCHITECTURES, EAGER, FAMILIES, WIDE

import streambp_fx
from benchmarks.families.worker import PADS, plain_experts
from streambp_fx.passes.s6_schedule.program import ChunksFirst, unrolled


def loops_of(model: Any) -> list[list[int]]:
    """The segments of each loop that several run in."""
    program = streambp_fx.schedule(model).program.instructions
    forward = (i for i in unrolled(program.forward) if isinstance(i, ChunksFirst))
    return [[call.segment for call in loop.body] for loop in forward]


def assert_together(model: Any, least: int) -> None:
    """So many segments, at the least, run in one loop."""
    loops = loops_of(model)
    assert loops and max(map(len, loops)) >= least, (loops, str(streambp_fx.schedule(model)))


@pytest.mark.parametrize("family", sample(FAMILIES, "mistral"))
def test_exact(family: str) -> None:
    """Full attention, windows, positions added to scores, masks of which rows see nothing."""
    impl = "eager" if family in EAGER else "sdpa"
    _, streamed = check_exact(functools.partial(build, family, impl), BATCHES, order="chunks")
    assert_together(streamed, 3)


@pytest.mark.parametrize("family", sample(ARCHITECTURES))
def test_exact_for_other_architectures(family: str) -> None:
    with in_double(functools.partial(model_of, family)):
        streamed = model_of(family)
        eager = copy.deepcopy(streamed)
        plain_experts(eager)
        transform(streamed, order="chunks")
        batches = {f"padding: {side}": batch(67, pads, side) for side, pads in PADS.items()}
        compare(eager, streamed, batches, 1e-9)
    assert_all_chunked(streamed, at_least=4)
    assert_together(streamed, 2 if family == "falcon_h1" else 3)


def _lora(target: str = "all-linear") -> Any:
    model = build("llama", num_hidden_layers=3)
    found = get_peft_model(model, LoraConfig(r=2, target_modules=target, task_type="CAUSAL_LM"))
    perturb(found, 0)
    for name, parameter in found.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return found


def _frozen_below() -> Any:
    """What is trained begins in the middle."""
    model = build("llama", num_hidden_layers=4)
    for module in (model.model.embed_tokens, *model.model.layers[:2]):
        module.requires_grad_(False)
    return model


def _tied() -> Any:
    return build("llama", tie_word_embeddings=True)


def _shared_layer() -> Any:
    model = build("llama", num_hidden_layers=3)
    model.model.layers[2].mlp = model.model.layers[0].mlp
    return model


@pytest.mark.parametrize("make", sample([_lora, _frozen_below, _tied, _shared_layer]))
def test_what_is_trained(make: Any) -> None:
    batches = {n: BATCHES[n] for n in ("T=67", "padded")}
    _, streamed = check_exact(make, batches, order="chunks")
    assert_together(streamed, 4)


class Shown(torch.nn.Module):
    """The loss, and the rows between the second layer and the third."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both, for tokens of shape (B, T)."""
        found = self.model(input_ids=input_ids, labels=labels, output_hidden_states=True)
        return found.loss, found.hidden_states[2]


@pytest.mark.slow
def test_what_somebody_else_reads_is_a_border() -> None:
    """Rows that the model returns are there for all chunks, and have a gradient of their own."""
    torch._dynamo.reset()
    factory = functools.partial(build, "llama", num_hidden_layers=4)
    with in_double(factory):
        eager = Shown(factory())
        model = copy.deepcopy(eager)
        options = {"chunk": 16, "loss_chunk": 8, "order": "chunks", "on_error": "raise"}
        streamed = torch.compile(model, backend="streambp", options=options)
        given = {k: v for k, v in plain(2, 67).items() if k in ("input_ids", "labels")}
        for own in (eager, streamed):
            loss, rows = own(**given)
            (loss + rows.pow(2).mean()).backward()
        for (name, want), got in zip(eager.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(got.grad, want.grad, rtol=1e-9, atol=1e-12, msg=name)
        assert loops_of(streamed) == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.slow
def test_dropout_draws_the_same_again() -> None:
    """The second forward of a chunk drops what the first has dropped: a finite difference agrees."""
    model = build("llama", attention_dropout=0.3).train()
    transform(model, order="chunks")
    given = plain(2, 67)
    parameter = model.model.layers[0].self_attn.v_proj.weight
    direction = torch.randn_like(parameter)

    def loss() -> torch.Tensor:
        torch.manual_seed(3)
        return model(**given).loss

    eps, found = 1e-5, []
    with true_double(model):
        loss().backward()
        assert_together(model, 3)
        slope = float((parameter.grad * direction).sum())
        for shift in (eps, -2 * eps):
            with torch.no_grad():
                parameter.add_(direction, alpha=shift)
            found.append(float(loss().detach()))
    assert (found[0] - found[1]) / (2 * eps) == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize("dtype", sample([torch.float16, torch.bfloat16]))
def test_half_precision(dtype: torch.dtype) -> None:
    """As near to float64 as with layers first."""
    errors = {}
    _, want = step(build("llama"), plain(2, 67))
    for order in ("layers", "chunks"):
        torch._dynamo.reset()
        model = build("llama", dtype=dtype)
        transform(model, order=order)
        _, got = step(model, plain(2, 67))
        errors[order] = sum(float((got[n].double() - want[n]).square().sum()) for n in want) ** 0.5
    assert errors["chunks"] < 1.2 * errors["layers"], errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "lora"),
    sample(list(itertools.product(["llama", "mistral", "mamba2"], [False, True])), ("mistral", False)),
)
def test_predicted_peak_is_what_is_live(family: str, lora: bool) -> None:
    torch._dynamo.reset()
    sizes = {"num_hidden_layers": 6, **WIDE, **({"sliding_window": 40} if family == "mistral" else {})}
    model = build(family, **sizes) if family != "mamba2" else model_of(family)
    model = model.float()
    if lora:
        # of the other modules of a Mamba PEFT says that they do not go
        targets = "all-linear" if family != "mamba2" else ["in_proj"]
        model = get_peft_model(model, LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM"))
    chunk = 64 if family == "mamba2" else 32
    transform(model, chunk=chunk, loss_chunk=32, order="chunks", check="never")
    step(model, plain(2, 80))
    cost = streambp_fx.schedule(model).cost
    for tokens in (512, 517, 129):  # the last are cut into 5 chunks of 26, or 3 of 43
        step(model, plain(2, tokens))
        predicted = cost.peak(cost.sizes(tokens)).total
        assert live(model, plain(2, tokens)) == pytest.approx(predicted, rel=0.01), tokens
    expression = cost.peak_expression(2)
    values = {"T": 512, "chunk": chunk, "loss_chunk": 32}
    bound = int(expression.subs({s: values[s.name] for s in expression.free_symbols}))
    assert bound == pytest.approx(cost.peak(cost.sizes(512)).total, rel=0.05)


@pytest.mark.parametrize(("window", "most"), sample([(None, 0.6), (64, 0.5)]))
def test_smaller_where_the_state_is(window: int | None, most: float) -> None:
    """One key head of eight; windows in three layers of four: their gradients are as long as the window."""
    kinds = [("sliding" if window and k % 4 else "full") + "_attention" for k in range(8)]
    sizes = {**WIDE, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 1}
    model = build("qwen2", **sizes, use_sliding_window=bool(window), sliding_window=window, layer_types=kinds)
    model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    peak, work = {}, {}
    for order in ("layers", "chunks"):
        cost = streambp_fx.explain(model, 2048, chunk=16, loss_chunk=16, order=order).cost
        moments = cost.timeline(cost.sizes(2048))
        peak[order], work[order] = max(m.total for m in moments), sum(m.flops for m in moments)
    assert peak["chunks"] <= most * peak["layers"], peak
    assert work["chunks"] <= 1.1 * work["layers"], work


def test_what_it_does_not_go_with() -> None:
    for options in ({"save": "attention"}, {"every": 2}, {"offload": "disk"}):
        with pytest.raises(ValueError, match='order="chunks"'):
            streambp_fx.Options(order="chunks", **options)


class Unchunked(torch.nn.Module):
    """Between two layers a mean over the sequence, which all rows read."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = torch.nn.Embedding(97, 16), torch.nn.Linear(16, 97)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of tokens of shape (B, T), and the rows before and after attention."""
        x = self.table(input_ids)
        x = x - x.mean(1, keepdim=True)
        y = torch.nn.functional.scaled_dot_product_attention(
            x[:, None], x[:, None], x[:, None], is_causal=True
        )
        y = y[:, 0] + x
        return torch.nn.functional.cross_entropy(self.head(y).flatten(0, 1), labels.flatten()), y


def test_an_order_that_cannot_be_followed_is_said() -> None:
    torch._dynamo.reset()
    model = Unchunked()
    streamed = torch.compile(model, backend="streambp", options={"chunk": 16, "order": "chunks"})
    given = {k: v for k, v in plain(2, 67).items() if k in ("input_ids", "labels")}
    given["labels"] = given["labels"].clamp_min(0)
    with pytest.warns(streambp_fx.StreamBPWarning) as caught:
        loss, rows = streamed(**given)
    (loss + rows.pow(2).mean()).backward()
    assert any('order="chunks" changes nothing' in str(w.message) for w in caught)
    assert not loops_of(streamed)


class Between(torch.nn.Module):
    """Three layers of attention; the model returns what it is told of the rows between them."""

    def __init__(self, shown: list[int]) -> None:
        super().__init__()
        self.shown, self.table, self.head = shown, torch.nn.Embedding(97, 16), torch.nn.Linear(16, 97)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(4))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The loss of tokens of shape (B, T), and rows of shape (B, T, 16)."""
        x, rows = self.table(input_ids), []
        for layer in self.layers:
            y = layer(x)[:, None]
            x = x + torch.nn.functional.scaled_dot_product_attention(y, y, y, is_causal=True)[:, 0]
            rows.append(x)
        loss = torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        return loss, *(rows[k] for k in self.shown)


@pytest.mark.parametrize(("shown", "alone"), [([], None), ([1], None), ([0, 1], "2"), ([0, 1, 2], "2, 3")])
def test_layers_that_run_one_after_the_other_are_said(shown: list[int], alone: str | None) -> None:
    """The lookup and the loss are no layers; a border between two loops is in the schedule alone."""
    torch._dynamo.reset()
    model = Between(shown).double()
    eager = copy.deepcopy(model)
    options = {"chunk": 16, "order": "chunks", "check": "never", "on_error": "raise"}
    streamed = torch.compile(model, backend="streambp", options=options)
    given = {k: v for k, v in plain(2, 67).items() if k in ("input_ids", "labels")}
    given["labels"] = given["labels"].clamp_min(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", streambp_fx.StreamBPWarning)
        for call in (eager, streamed):
            sum((found.square().mean() for found in call(**given)), torch.tensor(0.0)).backward()
    said = [str(w.message) for w in caught if "in part" in str(w.message)]
    assert len(said) == (alone is not None), said
    assert not alone or f"through segment {alone} before the next one begins, as what it reads" in said[0]
    assert str(streambp_fx.schedule(model)).count("begins behind all chunks") == bool(shown)
    for got, want in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-9, atol=1e-12)


class Convolved(torch.nn.Module):
    """Two layers that are alike: the rows before, read by one causal convolution and then by another."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = torch.nn.Embedding(97, 16), torch.nn.Linear(16, 97)
        layer = functools.partial(torch.nn.Conv1d, 16, 16, 3, padding=2)
        self.layers = torch.nn.ModuleList(torch.nn.ModuleList([layer(), layer()]) for _ in range(2))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss of tokens of shape (B, T)."""
        x, tokens = self.table(input_ids), input_ids.shape[1]
        for first, second in self.layers:
            before = torch.nn.functional.pad(x, (0, 0, 1, -1)).transpose(1, 2)
            y = torch.nn.functional.silu(first(before)[..., :tokens])
            x = x + second(y)[..., :tokens].transpose(1, 2)
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def test_rows_that_come_in_are_a_state() -> None:
    torch._dynamo.reset()
    model = Convolved().double()
    eager = copy.deepcopy(model)
    given = {k: v for k, v in plain(2, 67).items() if k in ("input_ids", "labels")}
    options = {"chunk": 16, "order": "chunks", "check": "never", "on_error": "raise"}
    streamed = torch.compile(model, backend="streambp", options=options)
    for call in (eager, streamed):
        call(**given).backward()
    for got, want in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-9, atol=1e-12)


class Shared(torch.nn.Module):
    """Layers that all read columns of one value."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        linear = functools.partial(torch.nn.Linear, 16, 16, dtype=torch.float64)
        self.kind, self.layers = kind, torch.nn.ModuleList(linear() for _ in range(4))

    def forward(self, embeds: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](embeds)
        kv = {"detached": x.detach, "drawn": lambda: 0 * torch.rand_like(x) + 0.5}.get(self.kind, x.sin)()
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        for layer in self.layers:
            keys = kv if self.kind == "keys" else x
            weights = (x @ keys.transpose(1, 2)).masked_fill(later, -torch.inf).softmax(-1)
            x = x + layer(weights @ kv).tanh()
        return (x + kv).square().mean()


@pytest.mark.filterwarnings("ignore:order=.chunks. changes nothing")
@pytest.mark.parametrize("kind", sample(["keys", "values", "detached", "drawn"], "keys"))
def test_columns_that_several_layers_read(kind: str) -> None:
    """Such a state is not made by one layer for itself: those layers come one after the other."""
    torch.manual_seed(0)
    eager = Shared(kind).to(DEVICE)
    model = copy.deepcopy(eager)
    transform(model, order="chunks", seq_dim={"embeds": 1}, chunk=8, on_error="raise", check="never")
    for length in (37, 33):
        embeds = torch.randn(2, length, 16, dtype=torch.float64, device=DEVICE)
        for own in (eager, model):
            own.zero_grad(set_to_none=True)
            own(embeds).backward()
        for (name, want), got in zip(eager.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(got.grad, want.grad, rtol=1e-9, atol=1e-12, msg=name)


def test_a_head_in_the_loop_has_the_chunks_of_the_layers() -> None:
    """What is counted, what is shown and what runs: 67 rows in chunks of 16, not of 5."""
    model = build("llama", num_hidden_layers=2).double()
    eager = copy.deepcopy(model)
    transform(model, chunk=16, loss_chunk=5, order="chunks", logits="keep")
    ids = torch.randint(0, 90, (2, 67), device=DEVICE)
    for each in (eager, model):
        each(input_ids=ids).logits.pow(2).mean().backward()
    for want, found in zip(eager.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found.grad, want.grad)
    schedule = streambp_fx.schedule(model).for_length(67)
    head = schedule.segments[-1]
    assert loops_of(model)[0][-1] == head.index and not head.mixings
    assert schedule.chunks(head) == 5
    counted = {m.chunk for m in schedule.timeline() if m.segment == head.index} - {None}
    assert counted == set(range(5))
