"""PEFT's adapters in float64: exact, and no work for weights that are frozen."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from e2e_check import (
    RTOL,
    assert_all_chunked,
    assert_close_grads,
    assert_close_loss,
    check_exact,
    compare,
    in_double,
    step,
    transform,
)
from e2e_memory import Work
from e2e_models import build, padded, perturb, plain

import streambp_fx

BATCHES = {"67": plain(2, 67), "padded": padded(40, "left")}
ATTENTION = ["q_proj", "v_proj"]


def adapted(make: Callable[..., Any] = peft.LoraConfig, **over: Any) -> Any:
    """A tiny model with an adapter whose weights are not at their start, where half the gradients vanish."""
    settings = {"r": 4, "target_modules": ATTENTION} if make is peft.LoraConfig else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = peft.get_peft_model(
            build("llama"), make(**{"task_type": "CAUSAL_LM", **settings, **over})
        ).double()
    perturb(model, 5)
    return model.train()


def marked(model: Any) -> Any:
    """With the hook on its embeddings that checkpointing needs, and no checkpointing."""
    model.enable_input_require_grads()
    return model


PROMPT = {"num_virtual_tokens": 5}
MORE_ADAPTERS: dict[str, Callable[[], Any]] = {
    "prompt tuning": lambda: adapted(peft.PromptTuningConfig, **PROMPT),
    "lora on all": lambda: adapted(target_modules="all-linear", r=32),
    "lora on two": adapted,
    "saved head": lambda: adapted(modules_to_save=["lm_head"]),
    "dora": lambda: adapted(use_dora=True),
    "p-tuning": lambda: adapted(peft.PromptEncoderConfig, **PROMPT, encoder_hidden_size=16),
    "ia3": lambda: adapted(
        peft.IA3Config, target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
}


def check_adapter(factory: Callable[[], Any]) -> None:
    eager, streamed = check_exact(factory, BATCHES)
    assert_all_chunked(streamed)
    trained = {n for n, p in streamed.named_parameters() if p.grad is not None}
    assert trained == {n for n, p in eager.named_parameters() if p.requires_grad} and trained


def test_low_rank_adapter() -> None:
    check_adapter(lambda: marked(adapted()))


@pytest.mark.slow
def test_an_adapter_without_a_task() -> None:
    """Its forward takes `*args, **kwargs` and hands them on."""
    check_adapter(lambda: adapted(task_type=None))


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_ADAPTERS)
def test_more_adapters(name: str) -> None:
    check_adapter(MORE_ADAPTERS[name])


def two_adapters() -> Any:
    model = adapted(target_modules=["q_proj"])
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    return model.double().train()


@pytest.mark.slow
def test_switching_between_adapters_merging_and_unmerging() -> None:
    """Each state of the adapters is a graph of its own, and none is taken for another."""
    with in_double(two_adapters):
        eager = two_adapters()
        streamed = transform(copy.deepcopy(eager))
        losses = []
        for adapter in ("default", "other", "default"):
            for model in (eager, streamed):
                model.set_adapter(adapter)
            compare(eager, streamed, {adapter: BATCHES["67"]}, RTOL[torch.float64])
            losses.append(float(step(streamed, BATCHES["67"])[0]))
        assert losses[0] == losses[2] != losses[1]
        with streamed.disable_adapter(), eager.disable_adapter():
            want, got = (m(**BATCHES["67"]).loss for m in (eager, streamed))
            assert abs(want - got) <= 1e-12 * abs(want) and not got.requires_grad
            assert abs(float(got) - losses[0]) > 1e-4
        for change in ("merge_adapter", "unmerge_adapter"):
            for model in (eager, streamed):
                getattr(model.base_model, change)()
            want, got = (m(**BATCHES["67"]).loss for m in (eager, streamed))
            assert abs(want - got) <= 1e-12 * abs(want)
        compare(eager, streamed, {"unmerged": BATCHES["67"]}, RTOL[torch.float64])


@pytest.mark.slow
def test_dropout_before_an_adapter() -> None:
    """The slope along a random direction is that of the loss under the same masks."""

    def factory() -> Any:
        return adapted(lora_dropout=0.2)

    def loss_of(model: Any) -> torch.Tensor:
        torch.manual_seed(1)
        return model(**BATCHES["67"]).loss

    with in_double(factory):
        model = transform(factory())
        loss = loss_of(model)
        loss.backward()
        assert abs(adapted()(**BATCHES["67"]).loss - loss) > 1e-6, "nothing was dropped"
        generator = torch.Generator().manual_seed(2)
        trained = [p for p in model.parameters() if p.requires_grad]
        ways = [torch.randn(p.shape, generator=generator, dtype=p.dtype).to(p) for p in trained]
        slope = sum(float((p.grad * w).sum()) for p, w in zip(trained, ways, strict=True))
        sides = []
        for sign in (1e-5, -2e-5):
            for parameter, way in zip(trained, ways, strict=True):
                parameter.data.add_(way, alpha=sign)
            sides.append(float(loss_of(model).detach()))
        assert abs((sides[0] - sides[1]) / 2e-5 - slope) <= 1e-6 * abs(slope)


def work_of(model: Any) -> int:
    step(model, plain(2, 67))  # compiles
    with Work() as work:
        step(model, plain(2, 67))
    return work.total


@pytest.mark.slow
def test_frozen_weights_cost_nothing() -> None:
    """A full step has one product more for each weight that an adapter's step leaves frozen."""
    full = transform(build("llama", dtype=torch.float32))
    frozen = transform(adapted(target_modules=["q_proj"], r=1).float())
    linear = [m.weight for m in full.modules() if isinstance(m, torch.nn.Linear)]
    gradients = 2 * 2 * 67 * sum(w.numel() for w in linear)
    assert work_of(frozen) <= work_of(full) - 0.98 * gradients


def test_names_are_kept() -> None:
    model = adapted()
    before = list(model.state_dict())
    assert list(streambp_fx.transform(model, chunk=16).state_dict()) == before


@pytest.mark.slow
def test_after_the_adapter_was_merged_away() -> None:
    """The model below goes on streaming, loss head and all, and its status says so."""
    model = streambp_fx.transform(adapted(), chunk=16)
    model(**plain(1, 40)).loss.backward()
    merged = model.merge_and_unload().requires_grad_()
    eager = copy.deepcopy(merged)
    streambp_fx.restore(eager)
    want, got = step(eager, plain(1, 40)), step(merged, plain(1, 40))
    assert_close_loss(got[0], want[0], 1e-9)
    assert_close_grads(got[1], want[1], 1e-9)
    found = streambp_fx.status(merged)
    assert (found.door, found.streamed, found.part) == ("transform", True, None), str(found)
