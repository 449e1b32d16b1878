"""A step of adapters on a base in 4 bits, streamed and with gradient checkpointing: peak memory, time, loss.

python -m benchmarks.quantised                              # 8192 tokens, chunk 2048
python -m benchmarks.quantised --tokens 2048 --chunk 512

A Llama of the size of the cases, its linear layers in NF4 by bitsandbytes (scales quantised as well), LoRA
on all of them, in float32. Each mode runs in a process of its own, from the same weights: one step to warm
up, and one that is measured; the time is taken with the allocator of the peak. Needs bitsandbytes (the extra
`quantised`) and PEFT.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from streambp_fx.measure.step import MMAP_THRESHOLD, Peak

from .cases import CONFIGS
from .gpu_steps import make_model
from .tables import MIB, new_table

MODES = ("checkpointing", "streamed")


def make(folder: str, mode: str, chunk: int) -> Any:
    """The model of a mode, loaded and prepared as people do it."""
    import peft
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    import streambp_fx

    four_bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    base = AutoModelForCausalLM.from_pretrained(folder, quantization_config=four_bits, device_map="cpu")
    base = peft.prepare_model_for_kbit_training(
        base,
        use_gradient_checkpointing=mode == "checkpointing",
        gradient_checkpointing_kwargs={"use_reentrant": False},
    )
    adapter = peft.LoraConfig(
        task_type="CAUSAL_LM", r=16, target_modules="all-linear", init_lora_weights=False
    )
    torch.manual_seed(0)  # the adapter begins with random numbers
    model = peft.get_peft_model(base, adapter).train()
    return streambp_fx.transform(model, chunk=chunk) if mode == "streamed" else model


def measured(folder: str, mode: str, tokens: int, chunk: int) -> dict[str, Any]:
    """Peak bytes over weights and gradients, seconds and loss of a step."""
    model = make(folder, mode, chunk)
    ids = torch.randint(model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
    for _ in range(2):  # the first compiles, and makes the gradients
        model.zero_grad(set_to_none=False)
        peak = Peak()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        found = peak.read()
    return {"peak_bytes": found.peak_bytes, "seconds": found.seconds, "loss": loss.item()}


def run(folder: str, mode: str, tokens: int, chunk: int) -> dict[str, Any]:
    """`measured` in a process of its own."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(MMAP_THRESHOLD)}
    out = Path(folder) / f"{mode}.json"
    work = ["--worker", mode, folder, "--tokens", str(tokens), "--chunk", str(chunk)]
    subprocess.run([sys.executable, "-m", "benchmarks.quantised", *work], env=environment, check=True)
    return json.loads(out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--worker", nargs=2, metavar=("MODE", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        mode, folder = args.worker
        found = measured(folder, mode, args.tokens, args.chunk)
        (Path(folder) / f"{mode}.json").write_text(json.dumps(found))
        return
    with tempfile.TemporaryDirectory() as folder:
        model: Any = make_model(CONFIGS["llama"], "cpu", torch.float32)
        model.save_pretrained(folder)
        results = {mode: run(folder, mode, args.tokens, args.chunk) for mode in MODES}
    table = new_table(
        f"{args.tokens} tokens, chunk {args.chunk}", "mode", "peak MiB", "times less", "s", "loss"
    )
    peer = results["checkpointing"]["peak_bytes"]
    for mode, r in results.items():
        peak = r["peak_bytes"]
        figures = f"{peak / MIB:.1f}", f"{peer / peak:.1f}x", f"{r['seconds']:.1f}", f"{r['loss']:.6f}"
        table.add_row(mode, *figures)
    Console().print(table)


if __name__ == "__main__":
    main()
