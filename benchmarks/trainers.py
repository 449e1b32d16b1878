"""Real training runs with TRL's trainers, streamed and with gradient checkpointing: loss and peak memory.

python -m benchmarks.trainers sft            # SmolLM2-135M, LoRA, 8192 tokens, the text of Python's manual
python -m benchmarks.trainers dpo            # pairs of 2 x 4096 tokens
python -m benchmarks.trainers sft --docs     # also puts the figures into the documentation

Each mode trains in a process of its own, from the same weights, on the same data; `--modes` runs one of them,
and the other is taken from an earlier run (build/trainers). The peak is that of the
kernel over forward and backward of a step, above the level before it; the first step, which compiles, does
not count. A run takes minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from streambp_fx.measure.step import MMAP_THRESHOLD, Peak
from streambp_fx.models.loading import SMOLLM2, english_tokens, load_model

from .plots import draw_training
from .session import DOCS
from .tables import MIB, new_table, number

MODES = ("checkpointing", "streamed")
#: Where the results of runs are kept.
OUT = Path("build/trainers")
#: Times less memory than with checkpointing that are required.
REQUIRED = 4.0


@dataclass(frozen=True)
class RunSpec:
    """One training run; can be sent to another process as JSON.

    Attributes:
        task: "sft" or "dpo".
        mode: "checkpointing" or "streamed".
        tokens: of each sequence.
        steps: of the optimizer.
        chunk, loss_chunk: sequence rows of a chunk ("streamed" only).
        source: of the model, see `models.loading.load_model`.
        options: further options of the callback ("streamed" only).
    """

    task: str
    mode: str
    tokens: int
    steps: int
    chunk: int
    loss_chunk: int = 256
    source: str = SMOLLM2
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Training:
    """What a run left: loss and peak bytes of each step, and seconds of the last."""

    spec: RunSpec
    losses: tuple[float, ...]
    peaks: tuple[int, ...]
    seconds: float

    @property
    def peak_bytes(self) -> int:
        """The largest peak after the step that compiles."""
        return max(self.peaks[1:])


# ---- in the process of a run


def train(spec: RunSpec, folder: str) -> Training:
    """Train; called in a process of its own."""
    from peft import LoraConfig, get_peft_model
    from transformers import TrainerCallback

    from streambp_fx.integrations import StreamBPCallback

    loaded = load_model(spec.source, tokenizer=True)
    shape = LoraConfig(r=32, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM")
    torch.manual_seed(0)  # the adapter begins with random numbers
    model = get_peft_model(loaded.model, shape)  # type: ignore[arg-type]
    seconds: list[float] = []
    peaks: list[int] = []

    class Meter(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.peak = Peak()

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            found = self.peak.read()
            peaks.append(found.peak_bytes)
            seconds.append(found.seconds)

    make = {"sft": _sft, "dpo": _dpo}[spec.task]
    trainer = make(spec, model, loaded, folder)
    if spec.mode == "streamed":
        settings = {"chunk": spec.chunk, "loss_chunk": spec.loss_chunk, **spec.options}
        trainer.add_callback(StreamBPCallback(**settings))
    trainer.add_callback(Meter())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return Training(spec, tuple(losses), tuple(peaks), seconds[-1])


def _arguments(spec: RunSpec, folder: str) -> dict[str, Any]:
    checkpointing = spec.mode == "checkpointing"
    return {
        "output_dir": folder, "max_steps": spec.steps, "per_device_train_batch_size": 1, "logging_steps": 1,
        "report_to": "none", "use_cpu": True, "save_strategy": "no", "bf16": False, "disable_tqdm": True,
        "gradient_checkpointing": checkpointing, "max_length": spec.tokens, "lr_scheduler_type": "constant",
        "gradient_checkpointing_kwargs": {"use_reentrant": False} if checkpointing else None,
    }  # fmt: skip


def _blocks(spec: RunSpec, loaded: Any, count: int, tokens: int) -> list[list[int]]:
    """Blocks of consecutive tokens of the text."""
    ids = english_tokens(loaded.tokenizer, count * tokens, vocab_size=loaded.vocab_size)
    return ids.view(count, tokens).tolist()


def _sft(spec: RunSpec, model: Any, loaded: Any, folder: str) -> Any:
    """Three blocks of the text, again and again: the loss of a block falls from one round to the next."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    data = Dataset.from_dict({"input_ids": _blocks(spec, loaded, 3, spec.tokens)})
    arguments = SFTConfig(**_arguments(spec, folder), learning_rate=1e-3, shuffle_dataset=False)
    return SFTTrainer(model=model, args=arguments, train_dataset=data, processing_class=loaded.tokenizer)


def _dpo(spec: RunSpec, model: Any, loaded: Any, folder: str) -> Any:
    """The text's own continuation is chosen, words in another order are rejected."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    half = spec.tokens // 2
    # somewhat too long, as text that is cut may have fewer tokens; the trainer cuts it to the length
    blocks = _blocks(spec, loaded, 2, spec.tokens + 64)
    decode = loaded.tokenizer.decode
    data = Dataset.from_dict({
        "prompt": [decode(b[:half]) for b in blocks],
        "chosen": [decode(b[half:]) for b in blocks],
        "rejected": [decode(b[half:][::-1]) for b in blocks],
    })  # fmt: skip
    arguments = DPOConfig(
        **_arguments(spec, folder), learning_rate=1e-4, precompute_ref_log_probs=True, dataset_num_proc=None
    )
    return DPOTrainer(model=model, args=arguments, train_dataset=data, processing_class=loaded.tokenizer)


# ---- in the process that was started


def kept(spec: RunSpec, again: bool) -> Training:
    """A run; the one of before, if it was the same and is not to be made again.

    Raises:
        RuntimeError: it failed.
    """
    file = OUT / f"{spec.task}-{spec.mode}.json"
    known = json.loads(file.read_text()) if file.is_file() else None
    if again or known is None or known["spec"] != asdict(spec):
        known = run(spec)
        OUT.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(known, indent=1) + "\n")
    return Training(spec, tuple(known["losses"]), tuple(known["peaks"]), known["seconds"])


def run(spec: RunSpec) -> dict[str, Any]:
    """Train in a process of its own; the fields of a `Training`.

    Raises:
        RuntimeError: it failed.
    """
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(MMAP_THRESHOLD), "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [
            sys.executable,
            "-m",
            "benchmarks.trainers",
            "--worker",
            json.dumps(asdict(spec)),
            str(out),
        ]
        done = subprocess.run(command, env=environment, text=True, stderr=subprocess.PIPE, check=False)
        if done.returncode:
            raise RuntimeError(f"{spec.task}, {spec.mode}: {done.stderr[-3000:]}")
        return json.loads(out.read_text())


def _worker(spec: str, out: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(out).write_text(json.dumps(asdict(train(RunSpec(**json.loads(spec)), folder))))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trainers", description=__doc__)
    parser.add_argument("task", choices=("sft", "dpo"))
    parser.add_argument("--tokens", type=int, help="of a sequence; 8192, for pairs 4096")
    parser.add_argument("--steps", type=int, default=9, help="of the streamed run; default %(default)s")
    parser.add_argument("--peer-steps", type=int, default=2, help="of the other; default %(default)s")
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--modes", default=",".join(MODES), help="that are run again; default %(default)s")
    parser.add_argument("--docs", action="store_true", help="also write the picture of the documentation")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 1 if less than what is required was reached."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["--worker"]:
        _worker(*given[1:])
        return 0
    args = _parser().parse_args(given)
    tokens = args.tokens or {"sft": 8192, "dpo": 4096}[args.task]
    steps = {"checkpointing": max(2, args.peer_steps), "streamed": max(2, args.steps)}
    specs = [RunSpec(args.task, m, tokens, steps[m], args.chunk, source=args.model) for m in MODES]
    found = [kept(spec, spec.mode in args.modes.split(",")) for spec in specs]
    table = new_table(f"{args.task}, {tokens:,} tokens", "", "peak MiB", "step s", "losses")
    for one in found:
        losses = " ".join(f"{loss:.4f}" for loss in one.losses)
        table.add_row(one.spec.mode, number(one.peak_bytes / MIB, ",.0f"), number(one.seconds), losses)
    ratio = found[0].peak_bytes / found[1].peak_bytes
    table.caption = f"{ratio:.1f}x less memory; required: {REQUIRED}x"
    Console().print(table)
    if args.docs:
        (DOCS / f"{args.task}.json").write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")
        draw_training(found, DOCS / args.task)
    return 0 if ratio >= REQUIRED else 1


if __name__ == "__main__":
    sys.exit(main())
