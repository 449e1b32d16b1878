"""What a chunk costs whatever its size: `python -m benchmarks.overhead`.

A model with hardly any arithmetic is stepped with many chunks and with two; the difference, for each chunk of
a layer more, is what Python, dispatch and the launching of kernels take. Beside it stands the work of a chunk
of 2,000 rows in a layer with 4,096 hidden values, counted on the schedule, at the rate of products here.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

import streambp_fx

WIDE: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
NARROW: dict[str, Any] = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
ROWS, LAYERS, CHUNKS, TOKENS = 2000, 2, 32, 128


def model(shape: dict[str, Any], layers: int) -> Any:
    config = Qwen3Config(vocab_size=32, num_hidden_layers=layers, tie_word_embeddings=True, **shape)
    return AutoModelForCausalLM.from_config(config).train()


def median_seconds(function: Callable[[], Any], repeats: int = 15) -> float:
    """Median time of a call, after two that do not count."""
    found = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        function()
        found.append(time.perf_counter() - start)
    return statistics.median(found[2:])


def seconds_of_a_chunk() -> float:
    """Seconds that one more chunk of one layer adds to a step, forward and backward."""
    tokens = torch.randint(0, 32, (1, TOKENS))
    times = {}
    for chunks in (2, CHUNKS):  # from the second on, a chunk has a prefix
        streamed = streambp_fx.transform(model(NARROW, LAYERS), chunk=TOKENS // chunks, loss_chunk=TOKENS)
        times[chunks] = median_seconds(functools.partial(_step, streamed, tokens))
    return (times[CHUNKS] - times[2]) / (LAYERS * (CHUNKS - 2))


def _step(streamed: Any, tokens: torch.Tensor) -> None:
    streamed(input_ids=tokens, labels=tokens).loss.backward()


def work_of_a_chunk() -> float:
    """Floating-point operations of the second chunk of a wide layer in a step: its share of two chunks."""
    found = []
    with torch.device("meta"):
        for layers in (1, 2):
            schedule = streambp_fx.explain(model(WIDE, layers), seq_len=2 * ROWS, chunk=ROWS)
            found.append(float(sum(m.flops for m in schedule.timeline())))
    return (found[1] - found[0]) / 2


def rate(size: int = 2048) -> float:
    """Floating-point operations a second of a product in float32."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    return 2 * size**3 / median_seconds(lambda: a @ b, 5)


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    overhead, work, speed = seconds_of_a_chunk(), work_of_a_chunk(), rate()
    print(f"a chunk of a layer costs {overhead * 1e3:.2f} ms whatever its size")
    print(f"chunk {ROWS}, {WIDE['hidden_size']} hidden values: {work / 1e12:.2f} TFLOP, forward and backward")
    share = overhead * speed / work
    print(f"at {speed / 1e9:.0f} GFLOP/s, as here: {work / speed:.1f} s, overhead {share:.4%}")
    print(f"2% at {0.02 * work / overhead / 1e12:.0f} TFLOP/s, if nothing of it overlaps with kernels")


if __name__ == "__main__":
    main()
