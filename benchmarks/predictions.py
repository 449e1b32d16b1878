"""Predicted peaks of the cost model beside two kinds of measured ones: `python -m benchmarks.predictions`.

Live bytes are counted op by op and see tensors alone; the peak of a process (VmHWM) has what kernels and the
allocator need as well. Both are over weights, gradients and the inputs.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import streambp_fx
from streambp_fx.measure.live_bytes import peak_live_bytes
from streambp_fx.measure.step import StepSpec, run_isolated
from streambp_fx.models.loading import load_model, random_tokens

from .tables import MIB

_IDS = {"vocab_size": 4096, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SHAPE = {
    **_IDS,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
}
_MIXED = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
_GPT2 = {"n_embd": 256, "n_layer": 4, "n_head": 8, "n_positions": 8192, **_IDS}
#: Config files: a family of each kind of attention, of norm and of feed-forward layer.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _SHAPE,
    "qwen3": {**_SHAPE, "head_dim": 32, "tie_word_embeddings": True},
    "gemma3_text": {**_SHAPE, "head_dim": 32, "sliding_window": 512, "layer_types": _MIXED},
    "mistral": {**_SHAPE, "sliding_window": 700},
    "gpt_neox": {**_SHAPE, "intermediate_size": 1024},
    "gpt2": _GPT2,
    "olmo2": _SHAPE,
    "bloom": {"hidden_size": 256, "n_layer": 4, "n_head": 8, **_IDS},
}


@dataclass(frozen=True)
class Case:
    """One streamed step.

    Attributes:
        config: key of `CONFIGS`.
        seq_len: tokens of the one sequence.
        chunk: rows of a chunk of a layer; the loss head has chunks of `loss_chunk`.
        dtype: of weights and activations.
        policy: options of `transform`: what is kept for the backward and where.
    """

    config: str
    seq_len: int
    chunk: int
    dtype: str = "float32"
    policy: dict[str, Any] = field(default_factory=dict)
    loss_chunk: int = 256

    def __str__(self) -> str:
        policy = " ".join(f"{k}={v}" for k, v in self.policy.items()) or "inputs"
        return f"{self.config} {self.seq_len}/{self.chunk} {self.dtype} {policy}"

    @property
    def options(self) -> dict[str, Any]:
        return {"chunk": self.chunk, "loss_chunk": self.loss_chunk, **self.policy}


ATTENTION, EVERY_2, DISK = {"save": "attention"}, {"every": 2}, {"offload": "disk"}
CASES = (
    Case("llama", 4096, 1024),
    Case("llama", 3000, 512, "bfloat16", ATTENTION),
    Case("qwen3", 4096, 512, "float32", EVERY_2),
    Case("qwen3", 6000, 2048, "bfloat16"),
    Case("gemma3_text", 4096, 512, "float32", ATTENTION),
    Case("mistral", 3072, 1024, "float64"),
    Case("gpt_neox", 2048, 512, "float64", ATTENTION),
    Case("gpt_neox", 4096, 1024, "bfloat16", EVERY_2),
    Case("gpt2", 4096, 512, "float32", DISK),
    Case("olmo2", 3000, 700, "float64", {**DISK, **EVERY_2}),
    Case("olmo2", 4096, 512, "float32", {**DISK, **ATTENTION}),
    Case("bloom", 2048, 256, "float32"),
)


@dataclass(frozen=True)
class Peaks:
    """Peak bytes over weights, gradients and inputs: predicted, of live tensors, and of the process."""

    predicted: int
    live: int
    process: int


def config_file(case: Case, folder: Path) -> str:
    """Write the config of a case to a file, a source for `load_model`."""
    path = folder / f"{case.config}.json"
    path.write_text(json.dumps({"model_type": case.config, **CONFIGS[case.config]}))
    return str(path)


def predicted(case: Case, source: str) -> int:
    """Peak bytes by the cost model; nothing is run."""
    model = load_model(source, getattr(torch, case.dtype)).model
    schedule = streambp_fx.explain(model, case.seq_len, **case.options)
    return schedule.cost.peak(schedule.cost.sizes(case.seq_len)).total


def live(case: Case, source: str) -> int:
    """Peak bytes of tensors in a step run in this process."""
    model = load_model(source, getattr(torch, case.dtype)).model
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    streambp_fx.transform(model, **case.options)
    ids = random_tokens(_IDS["vocab_size"], case.seq_len).view(1, -1)

    def step(tokens: torch.Tensor) -> None:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()

    step(ids[:, : case.chunk + 9])
    known = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None), ids]
    found = peak_live_bytes(lambda: step(ids), known)
    streambp_fx.restore(model)
    gc.collect()
    return found


def of_process(case: Case, source: str) -> int:
    """Peak bytes of a process that runs the step (VmHWM; Linux only)."""
    options = {k: v for k, v in case.options.items() if k not in ("chunk", "loss_chunk")}
    spec = StepSpec(
        source, "streamed", case.seq_len, case.chunk, case.loss_chunk, case.dtype, options=options
    )
    return run_isolated(spec, "peak").peak_bytes


def peaks(case: Case) -> Peaks:
    """Predict and measure one case."""
    with tempfile.TemporaryDirectory() as folder:
        source = config_file(case, Path(folder))
        return Peaks(predicted(case, source), live(case, source), of_process(case, source))


def row(case: Case, found: Peaks) -> str:
    """A line of the table in Markdown: MiB, and predicted over measured."""
    policy = ", ".join(f'`{k}="{v}"`' if isinstance(v, str) else f"`{k}={v}`" for k, v in case.policy.items())
    what = [case.config, f"{case.seq_len:,}", f"{case.chunk:,}", case.dtype, policy]
    each = [f"{found.predicted / MIB:.1f}"]
    each += [f"{m / MIB:.1f} ({found.predicted / m - 1:+.1%})" for m in (found.live, found.process)]
    return f"| {' | '.join([*what, *each])} |"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.predictions", description=__doc__)
    parser.add_argument("--only", metavar="TEXT", default="", help="cases with this in their name")
    args = parser.parse_args(argv)
    print("| model | tokens | chunk | dtype | policy | predicted, MiB | live tensors | process |")
    print("|---|---|---|---|---|---|---|---|")
    for case in CASES:
        if args.only in str(case):
            print(row(case, peaks(case)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
