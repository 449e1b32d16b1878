"""What is saved of which rows, drawn at random: the gradients are the same."""

from __future__ import annotations

import functools
import random
from fractions import Fraction
from typing import Any

import pytest
import torch
from e2e_check import check_exact, compare, in_double, pair, step, transform
from e2e_memory import live
from e2e_models import build, padded, plain, sample
from test_architectures import batch, exact_and_streamed_whole

import streambp_fx
from benchmarks.families.worker import PADS
from streambp_fx.passes.step.saving import ATTENTION, Piece, Price, Saving

PRICES = [None, ATTENTION, Price(2000, 4096), Price(300, 4096), Price(60, 100), Price(1, 4096)]
BATCHES = {
    "T=67": plain(2, 67),
    "T=3": plain(2, 3),
    "padded": padded(67, "left"),
    "padded right": padded(50, "right"),
}
WIDE = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 97, "max_position_embeddings": 2048}
FAMILIES = ["llama", "gpt2", "gemma3_text", "mistral", "falcon_alibi", "bloom", "gemma2", "opt", "phi"]
EAGER = ("gemma2", "bloom")
# Experts, latents, recurrences, both in turn, sinks.
ARCHITECTURES = ["qwen3_moe", "deepseek_v3", "mamba2", "qwen3_next", "gpt_oss", "falcon_h1", "minicpm3"]


def drawn(seed: int, segments: int = 40) -> Saving:
    """Up to four pieces of each segment."""
    rng = random.Random(seed)

    def pieces() -> tuple[Piece, ...]:
        stops = sorted({Fraction(rng.randint(1, 15), 16) for _ in range(rng.choice([0, 0, 1, 3]))})
        return tuple(Piece(stop, rng.choice(PRICES)) for stop in (*stops, Fraction(1)))

    return Saving(tuple(pieces() if rng.random() < 0.8 else () for _ in range(segments)))


DRAWS = [(family, seed) for family in FAMILIES for seed in range(2)]


@pytest.mark.parametrize(("family", "seed"), sample(DRAWS))
def test_exact(family: str, seed: int) -> None:
    impl = "eager" if family in EAGER else "sdpa"
    check_exact(functools.partial(build, family, impl), BATCHES, save=drawn(seed))


@pytest.mark.parametrize("family", sample(ARCHITECTURES))
def test_exact_for_other_architectures(family: str) -> None:
    batches = {f"padding: {side}": batch(67, pads, side) for side, pads in PADS.items()}
    exact_and_streamed_whole(family, batches, save=drawn(3))


@pytest.mark.parametrize(
    "options", sample([{"every": 2}, {"offload": "disk"}, {"every": 3, "offload": "disk"}])
)
def test_exact_with_other_policies(options: dict) -> None:
    factory = functools.partial(build, "llama", num_hidden_layers=3)
    check_exact(factory, BATCHES, save=drawn(7), **options)


def drawn_way(seed: int) -> tuple[str, dict[str, Any]]:
    """A family, and one of all ways to run its steps: what is kept, where, in which order and chunks."""
    rng = random.Random(seed)
    way: dict[str, Any] = {"chunk": rng.choice([5, 16, 33]), "loss_chunk": rng.choice([3, 16, 40])}
    if rng.random() < 0.25:
        return rng.choice(FAMILIES), {**way, "order": "chunks"}
    way |= {"save": rng.choice(["inputs", "attention", drawn(seed)]), "every": rng.choice([1, 1, 2, 3])}
    if rng.random() < 0.5:
        way |= {"offload": "disk", "offload_rows": rng.random() < 0.5}
    return rng.choice(FAMILIES), way


@pytest.mark.parametrize("seed", sample(list(range(24))))
def test_exact_in_drawn_ways(seed: int) -> None:
    family, way = drawn_way(seed)
    impl = "eager" if family in EAGER else "sdpa"
    check_exact(functools.partial(build, family, impl), BATCHES, **way)


@pytest.mark.parametrize("body", sample(["eager", "inductor"]))
def test_as_much_is_saved_as_there_is_memory_for(body: str) -> None:
    """Exact, and within the budget by the cost model; the more memory, the less is computed again."""
    factory = functools.partial(build, "llama", num_hidden_layers=3, **WIDE)
    given: dict[str, Any] = {"chunk": 64, "loss_chunk": 64, "body": body}
    work = []
    with in_double(factory):
        cost = streambp_fx.explain(factory(), 512, **given).cost
        least = cost.peak(cost.sizes(512)).total
        for memory in (least, 3 * least // 2, 100 * least):
            torch._dynamo.reset()
            eager, streamed = pair(factory, **given, policy="auto", memory=memory)
            compare(eager, streamed, {"T=512": plain(1, 512)}, 1e-9)
            schedule = streambp_fx.schedule(streamed)
            assert schedule.check is not None and schedule.check.status == "agrees", schedule.check
            own = schedule.cost
            assert own.peak(own.sizes(512)).total <= memory, schedule
            work.append(sum(m.flops for m in own.timeline(own.sizes(512))))
    assert work == sorted(work, reverse=True) and work[0] > work[1] > work[2], work


@pytest.mark.slow
@pytest.mark.parametrize("family", sample(["llama", "gemma3_text"], "llama"))
def test_the_peak_is_as_predicted_and_within_the_budget(family: str) -> None:
    def streamed(**options: Any) -> tuple[Any, Any]:
        torch._dynamo.reset()
        model = build(family, dtype=torch.float32, **WIDE)
        transform(model, chunk=64, loss_chunk=64, check="never", **options)
        step(model, plain(1, 512))
        return model, streambp_fx.schedule(model).cost

    _, cost = streamed()
    least = cost.peak(cost.sizes(512)).total
    for share in (1.3, 100):
        model, cost = streamed(policy="auto", memory=int(share * least))
        predicted = cost.peak(cost.sizes(512)).total
        found = live(model, plain(1, 512))
        assert found == pytest.approx(predicted, rel=0.01), share
        assert found <= 1.001 * share * least and predicted > least
