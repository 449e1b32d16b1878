"""Gradients of everything: frozen, tied, adapted, accumulated, hooked, scaled; and what is refused."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from e2e_check import (
    assert_close_grads,
    assert_close_loss,
    check_exact,
    compare,
    grads,
    in_double,
    pair,
    transform,
)
from e2e_models import CHUNK, VOCAB, build, padded, plain, sample
from torch import nn
from torch.fx.experimental import proxy_tensor

import streambp_fx

RTOL = 1e-9
LLAMA = functools.partial(build, "llama")
BATCHES = {"T=67": plain(2, 67), "T=65": plain(2, 65)}


def freeze(model: Any, trained: Any) -> Any:
    for name, p in model.named_parameters():
        p.requires_grad_(trained(name))
    return model


# -- which parameters train ----------------------------------------------------------------------------


TIED = [(family, tied) for family in ("llama", "gemma2", "opt") for tied in (True, False)]


@pytest.mark.parametrize(("family", "tied"), sample(TIED, ("llama", True)))
def test_tied_and_untied_embeddings(family: str, tied: bool) -> None:
    factory = functools.partial(build, family, tie_word_embeddings=tied)
    model = factory()
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
    check_exact(factory, BATCHES)


FREEZES = {
    "the first layer": lambda n: ".layers.0." not in n,
    "the last layer": lambda n: ".layers.1." not in n,
    "all but the norms": lambda n: "norm" in n,
    "the embedding": lambda n: "embed_tokens" not in n,
    "embedding and first layer": lambda n: "embed_tokens" not in n and ".layers.0." not in n,
    "the head": lambda n: "lm_head" not in n,
    "all but the head": lambda n: "lm_head" in n,
    "keys and values": lambda n: "k_proj" not in n and "v_proj" not in n,
    "all but the keys of layer 0": lambda n: n.endswith("layers.0.self_attn.k_proj.weight"),
    "all but the embedding": lambda n: "embed_tokens" in n,
}


@pytest.mark.parametrize(
    "which",
    sample(
        FREEZES,
        "all but the norms",
    ),
)
def test_frozen_parameters(which: str) -> None:
    trained = FREEZES[which]
    eager, streamed = check_exact(lambda: freeze(LLAMA(), trained), BATCHES)
    for model in (eager, streamed):
        have = {n for n, p in model.named_parameters() if p.grad is not None}
        assert have == {n for n, _ in model.named_parameters() if trained(n)}


@pytest.mark.slow
def test_frozen_tied_embedding() -> None:
    factory = functools.partial(build, "qwen3", tie_word_embeddings=True)
    _, streamed = check_exact(lambda: freeze(factory(), lambda n: "embed_tokens" not in n), BATCHES)
    assert streamed.lm_head.weight.grad is None


@pytest.mark.slow
def test_freezing_and_thawing_between_steps() -> None:
    """requires_grad is read at each step, not when the model was transformed."""
    with in_double(LLAMA):
        eager, streamed = pair(LLAMA)
        for which in ("the first layer", "the head", "all but the norms"):
            for model in (eager, streamed):
                freeze(model, FREEZES[which])
            compare(eager, streamed, {which: plain(2, 67)}, RTOL)
        for model in (eager, streamed):
            freeze(model, lambda n: True)
        compare(eager, streamed, {"all": plain(2, 67)}, RTOL)


class LowRank(nn.Module):
    """A frozen linear layer and a trained low-rank correction, as LoRA has it."""

    def __init__(self, base: nn.Linear, rank: int, seed: int) -> None:
        super().__init__()
        gen = torch.Generator().manual_seed(seed)
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features, generator=gen, dtype=torch.float64) / 4)
        self.up = nn.Parameter(torch.randn(base.out_features, rank, generator=gen, dtype=torch.float64) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 2.0 * nn.functional.linear(nn.functional.linear(x, self.down), self.up)


def lora(targets: tuple[str, ...]) -> Any:
    model = build("llama").requires_grad_(False)
    for seed, (name, module) in enumerate(list(model.named_modules())):
        leaf = name.rpartition(".")[2]
        if leaf in targets:
            parent = model.get_submodule(name.rpartition(".")[0])
            setattr(parent, leaf, LowRank(module, 4, seed))
    return model


ADAPTED = [(("q_proj", "v_proj"),), (("k_proj", "down_proj"),), (("up_proj",),)]


@pytest.mark.slow
@pytest.mark.parametrize(("targets",), ADAPTED)
def test_low_rank_adapters(targets: tuple[str, ...]) -> None:
    eager, streamed = check_exact(lambda: lora(targets), BATCHES)
    for model in (eager, streamed):
        have = {n for n, p in model.named_parameters() if p.grad is not None}
        assert have == {n for n, _ in model.named_parameters() if n.endswith((".up", ".down"))}
        assert len(have) == 2 * 2 * len(targets)


# -- inputs that train ---------------------------------------------------------------------------------


EMBEDDED = [("llama", True), ("llama", False), ("gemma2", False), ("gpt2", False)]


@pytest.mark.parametrize(("family", "frozen"), sample(EMBEDDED))
def test_inputs_embeds(family: str, frozen: bool) -> None:
    factory = functools.partial(build, family)
    with in_double(factory):
        eager, streamed = pair(lambda: freeze(factory(), lambda n: not frozen))
        for length in (67, 65, 11):
            gen = torch.Generator().manual_seed(length)
            embeds = torch.randn(2, length, 32, generator=gen, dtype=torch.float64)
            ends = []
            for model in (eager, streamed):
                model.zero_grad(set_to_none=True)
                leaf = embeds.clone().requires_grad_()
                loss = model(inputs_embeds=leaf, labels=plain(2, length)["labels"]).loss
                loss.backward()
                ends.append((loss.detach(), {**grads(model), "inputs_embeds": leaf.grad}))
            assert_close_loss(ends[1][0], ends[0][0], RTOL)
            assert_close_grads(ends[1][1], ends[0][1], RTOL, f"T={length}")
            assert ends[1][1]["inputs_embeds"] is not None


@pytest.mark.slow
def test_soft_prompt() -> None:
    """Prompt tuning: inputs_embeds is the result of other operations, only the prompt trains."""
    with in_double(LLAMA):
        eager, streamed = pair(lambda: LLAMA().requires_grad_(False))
        batch = plain(2, 60)
        labels = torch.cat([torch.full((2, 7), -100), batch["labels"]], 1)
        got = []
        for model in (eager, streamed):
            prompt = torch.linspace(-1, 1, 7 * 32, dtype=torch.float64).view(1, 7, 32).requires_grad_()
            embeds = torch.cat(
                [prompt.expand(2, -1, -1), model.get_input_embeddings()(batch["input_ids"])], 1
            )
            model(inputs_embeds=embeds, labels=labels).loss.backward()
            assert all(p.grad is None for p in model.parameters())
            got.append({"prompt": prompt.grad})
        assert_close_grads(got[1], got[0], RTOL)


# -- other objectives and other calls ------------------------------------------------------------------


@pytest.mark.parametrize("family", sample(["llama", "gemma2", "bloom"], "llama"))
def test_logits_without_labels(family: str) -> None:
    """Without labels the logits come back and are differentiable; a length of one row included."""
    factory = functools.partial(build, family)
    with in_double(factory):
        eager, streamed = pair(factory)
        for length in (67, 11, 1):
            ends = []
            for model in (eager, streamed):
                model.zero_grad(set_to_none=True)
                logits = model(input_ids=plain(2, length)["input_ids"]).logits
                assert logits.shape == (2, length, VOCAB)
                logits.log_softmax(-1)[..., 5].square().mean().backward()
                ends.append((logits.detach(), grads(model)))
            assert (ends[0][0] - ends[1][0]).norm() <= RTOL * ends[0][0].norm()
            assert_close_grads(ends[1][1], ends[0][1], RTOL, f"T={length}")


@pytest.mark.slow
def test_labels_drop_or_keep_the_logits() -> None:
    with in_double(LLAMA):
        eager, dropped = pair(LLAMA)
        kept = transform(LLAMA(), logits="keep")
        batch = plain(2, 67)
        assert dropped(**batch).logits is None
        out, want = kept(**batch), eager(**batch)
        assert (out.logits - want.logits).norm() <= RTOL * want.logits.norm()
        # both outputs in one objective
        for model, result in ((eager, want), (kept, out)):
            model.zero_grad(set_to_none=True)
            (result.loss + result.logits.square().mean()).backward()
        assert_close_grads(grads(kept), grads(eager), RTOL)


CALLS: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    "positional": lambda m, batch: m(batch["input_ids"], labels=batch["labels"]).loss,
    "tuple": lambda m, batch: m(**batch, return_dict=False)[0],
    "hidden states": lambda m, batch: m(**batch, output_hidden_states=True).loss,
    "positions": lambda m, batch: m(**batch, position_ids=torch.arange(3, 70).expand(2, -1)).loss,
    "cache": lambda m, batch: m(**batch, use_cache=True).loss,
}


# What is said of them: all others say nothing.
UNSTREAMED = {"hidden states": "output_hidden_states"}


def unstreamed(words: str | None) -> contextlib.AbstractContextManager[Any]:
    """Expects a warning with these words, if there are any."""
    return pytest.warns(streambp_fx.StreamBPWarning, match=words) if words else contextlib.nullcontext()


@pytest.mark.parametrize("style", sample(CALLS))
def test_call_styles(style: str) -> None:
    """Positional ids, tuples, hidden states: whatever the caller may ask for, the gradient is right."""
    with in_double(LLAMA):
        ends = []
        for model, words in zip(pair(LLAMA), (None, UNSTREAMED.get(style)), strict=True):
            with unstreamed(words):
                loss = CALLS[style](model, plain(2, 67))
            loss.backward()
            ends.append((loss.detach(), grads(model)))
        assert_close_loss(ends[1][0], ends[0][0], RTOL, style)
        assert_close_grads(ends[1][1], ends[0][1], RTOL, style)


def test_hidden_states_are_returned_when_asked_for() -> None:
    with in_double(LLAMA):
        eager, streamed = pair(LLAMA)
        want = eager(**plain(2, 67), output_hidden_states=True).hidden_states
        with unstreamed("output_hidden_states"):
            got = streamed(**plain(2, 67), output_hidden_states=True).hidden_states
        assert len(got) == len(want) == 3
        for g, w in zip(got, want, strict=True):
            assert (g - w).norm() <= RTOL * w.norm()


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["sdpa", "eager"])
def test_packed_sequences(impl: str) -> None:
    """Positions that start again: transformers then attends within each document only."""
    factory = functools.partial(build, "llama", impl)
    positions = torch.cat([torch.arange(30), torch.arange(37)])[None]
    batch = {**plain(1, 67), "position_ids": positions}
    with in_double(factory):
        model = factory()
        apart = model(**batch).loss
        joined = model(**plain(1, 67), position_ids=torch.arange(67)[None]).loss
        assert abs(apart - joined) > 1e-6  # or this test would show nothing
    check_exact(factory, {"packed": batch})


# -- accumulation, scaling, hooks ----------------------------------------------------------------------


@pytest.mark.slow
def test_accumulation_over_micro_batches() -> None:
    with in_double(LLAMA):
        eager, streamed = pair(LLAMA)
        for model in (eager, streamed):
            for seed in range(3):
                (model(**plain(2, 67, seed)).loss / 3).backward()
        assert_close_grads(grads(streamed), grads(eager), RTOL)


@pytest.mark.slow
def test_two_losses_one_backward() -> None:
    """Two streamed graphs alive at once."""
    with in_double(LLAMA):
        eager, streamed = pair(LLAMA)
        for model in (eager, streamed):
            (model(**plain(2, 67, 1)).loss * 2 + model(**plain(2, 65, 2)).loss.square()).backward()
        assert_close_grads(grads(streamed), grads(eager), RTOL)


@pytest.mark.slow
def test_loss_scaled_before_backward() -> None:
    with in_double(LLAMA):
        eager, streamed = pair(LLAMA)
        for model in (eager, streamed):
            (model(**plain(2, 67)).loss * 1024.0).backward()
        assert_close_grads(grads(streamed), grads(eager), RTOL)


@pytest.mark.slow
def test_forward_without_backward_leaves_no_gradient() -> None:
    with in_double(LLAMA):
        eager, streamed = pair(LLAMA)
        loss = streamed(**plain(2, 67)).loss
        assert loss.requires_grad
        assert all(p.grad is None for p in streamed.parameters())
        assert_close_loss(loss.detach(), eager(**plain(2, 67)).loss.detach(), RTOL)


@pytest.mark.parametrize("tied", sample([True, False]))
def test_hooks_fire_once(tied: bool) -> None:
    factory = functools.partial(build, "llama", tie_word_embeddings=tied)
    with in_double(factory):
        ends = []
        for model in pair(factory):
            fired: dict[str, list[str]] = {n: [] for n, _ in model.named_parameters()}
            seen: dict[str, torch.Tensor | None] = {}

            def on_tensor(g: torch.Tensor, name: str, fired: Any = fired, seen: Any = seen) -> None:
                fired[name].append("tensor")
                seen[name] = g.clone()

            def on_accumulated(p: torch.Tensor, name: str, fired: Any = fired) -> None:
                fired[name].append("accumulated")

            for name, p in model.named_parameters():
                p.register_hook(functools.partial(on_tensor, name=name))
                p.register_post_accumulate_grad_hook(functools.partial(on_accumulated, name=name))
            for _ in range(2):
                model(**plain(2, 67)).loss.backward()
            assert fired == {n: ["tensor", "accumulated"] * 2 for n in fired}
            ends.append(seen)
        assert_close_grads(ends[1], ends[0], RTOL)


def test_hook_that_changes_the_gradient() -> None:
    with in_double(LLAMA):
        eager, streamed = pair(LLAMA)
        for model in (eager, streamed):
            model.model.layers[0].mlp.up_proj.weight.register_hook(lambda g: -3 * g)
        compare(eager, streamed, {"hooked": plain(2, 67)}, RTOL)


@pytest.mark.slow
def test_training_with_an_optimizer() -> None:
    """Ten steps of AdamW in which weights change under the compiled program."""
    with in_double(LLAMA):
        losses = []
        for model in pair(LLAMA):
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            curve = []
            for _ in range(10):
                optimizer.zero_grad()
                loss = model(**plain(2, 67)).loss
                loss.backward()
                optimizer.step()
                curve.append(loss.item())
            losses.append(torch.tensor(curve))
        assert losses[0][-1] < losses[0][0] - 0.5
        # Adam divides by the root of squares: 1e-9 grows over the steps, a wrong gradient far more
        assert (losses[1] - losses[0]).abs().max() < 1e-6


# -- numbers that change, and what compiles when -------------------------------------------------------


@contextlib.contextmanager
def compilations(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Counts Dynamo's compilations and make_fx traces."""
    from torch._dynamo import convert_frame

    count = {"dynamo": 0, "trace": 0}

    def counted(owner: Any, name: str, key: str) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            count[key] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    with monkeypatch.context():
        counted(convert_frame, "_compile", "dynamo")
        counted(proxy_tensor._MakefxTracer, "trace", "trace")
        yield count


@pytest.mark.slow
def test_the_counter_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    with compilations(monkeypatch) as count:
        torch.compile(lambda x: x * 2, backend="eager")(torch.ones(3))
        proxy_tensor.make_fx(lambda x: x * 2)(torch.ones(3))
    assert count == {"dynamo": 1, "trace": 1}


@pytest.mark.slow
@pytest.mark.parametrize("kind", sample([int, torch.tensor], int))
def test_num_items_in_batch_changes_without_recompiling(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with in_double(LLAMA), compilations(monkeypatch) as count:
        eager, streamed = pair(LLAMA)
        for n, items in enumerate((100, 7, 1, 23, 512)):
            batch = {**plain(2, 67), "num_items_in_batch": kind(items)}
            compare(eager, streamed, {f"{items} items": batch}, RTOL)
            if n == 0:
                before = dict(count)
        assert before["dynamo"] > 0, "the first step compiled nothing that this test can see"
        assert count == before


@pytest.mark.slow
def test_a_new_length_does_not_capture_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with in_double(LLAMA), compilations(monkeypatch) as count:
        eager, streamed = pair(LLAMA)
        compare(eager, streamed, {"T=67": plain(2, 67)}, RTOL)
        before = count["dynamo"]
        assert before > 0, "the first step compiled nothing that this test can see"
        compare(eager, streamed, {f"T={t}": plain(2, t) for t in (97, 64, 65, 11, CHUNK, 8)}, RTOL)
        assert count["dynamo"] == before


@pytest.mark.slow
def test_many_batch_sizes_compile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """More sizes than Dynamo allows graphs by default, and one of one sequence, which has its own."""
    with in_double(LLAMA), compilations(monkeypatch) as count:
        eager, streamed = pair(LLAMA)
        dynamo = []
        for size in (2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 11, 2):
            compare(eager, streamed, {f"batch of {size}": plain(size, 20 + size)}, RTOL)
            dynamo.append(count["dynamo"])
    assert dynamo[8] == dynamo[0] > 0, dynamo
    assert dynamo[-1] == 2 * dynamo[0], dynamo


@pytest.mark.slow
def test_mask_with_and_without_padding_take_turns() -> None:
    """All ones, padded, all ones: the unmasked kernel must not be kept for the padded batch."""
    batches = {
        "ones": padded(67, "right", pads=(0, 0)),
        "left": padded(67, "left"),
        "ones again": padded(67, "right", pads=(0, 0)),
        "right": padded(67, "right"),
        "no mask": plain(2, 67),
    }
    check_exact(LLAMA, batches)


# -- backward twice ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_retain_graph_then_again() -> None:
    """Adds up as eager's does, or refuses in words."""
    with in_double(LLAMA):
        eager, streamed = pair(LLAMA)
        loss = eager(**plain(2, 67)).loss
        loss.backward(retain_graph=True)
        loss.backward()
        loss = streamed(**plain(2, 67)).loss
        try:
            loss.backward(retain_graph=True)
            loss.backward()
        except RuntimeError as refusal:
            assert "retain_graph" in str(refusal)
        else:
            assert_close_grads(grads(streamed), grads(eager), RTOL)


@pytest.mark.slow
def test_backward_twice_without_retaining_raises() -> None:
    streamed = transform(LLAMA())
    loss = streamed(**plain(2, 67)).loss
    loss.backward()
    with pytest.raises(RuntimeError, match=r"second time|retain_graph"):
        loss.backward()


def test_double_backward_is_refused() -> None:
    streamed = transform(LLAMA())
    weight = streamed.model.layers[0].mlp.up_proj.weight
    with pytest.raises(
        RuntimeError, match=r"(?i)(double backward|create_graph|twice).*not supported|not supported.*"
    ):
        (grad,) = torch.autograd.grad(streamed(**plain(2, 67)).loss, weight, create_graph=True)
        grad.square().sum().backward()


@pytest.mark.slow
def test_after_a_refusal_training_goes_on() -> None:
    with in_double(LLAMA):
        eager, streamed = pair(LLAMA)
        with contextlib.suppress(RuntimeError):
            streamed(**plain(2, 67)).loss.backward(create_graph=True)
        compare(eager, streamed, {"after": plain(2, 67)}, RTOL)


@pytest.mark.slow
def test_autograd_grad_of_some_parameters() -> None:
    """torch.autograd.grad instead of backward, for two parameters only."""
    with in_double(LLAMA):
        got = []
        for model in pair(LLAMA):
            wanted = {n: p for n, p in model.named_parameters() if "layers.0.self_attn" in n}
            values = torch.autograd.grad(model(**plain(2, 67)).loss, list(wanted.values()))
            assert all(p.grad is None for p in model.parameters())
            got.append(dict(zip(wanted, values, strict=True)))
        assert_close_grads(got[1], got[0], RTOL)


@pytest.mark.slow
def test_two_models_side_by_side() -> None:
    """Two transformed models of one class and different weights do not share anything."""
    with in_double(LLAMA):
        first, second = pair(LLAMA), pair(functools.partial(build, "llama", seed=5))
        for eager, streamed in (first, second, first):
            compare(eager, streamed, {"T=67": plain(2, 67)}, RTOL)
        assert copy.deepcopy(first[0].lm_head.weight).equal(first[1].lm_head.weight)
        assert not first[1].lm_head.weight.equal(second[1].lm_head.weight)
