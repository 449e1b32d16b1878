"""The process in which the published StreamBP is measured, in an environment of its own.

python published.py --checkout PATH --what WHAT --json SPEC

It is run by the Python of that environment, whose transformers are too old for this package, so it imports
nothing of it: the meter is loaded from its file. Arguments and events are `streambp_fx.measure.worker`'s.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

METER = Path(__file__).parents[1] / "streambp_fx" / "measure" / "step.py"
#: Its authors' choice.
LOGITS_CHUNK = 100


def meter() -> Any:
    """The module `streambp_fx.measure.step`, without the package."""
    spec = importlib.util.spec_from_file_location("measure", METER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["measure"] = module
    spec.loader.exec_module(module)
    return module


def load_model(checkout: Path, spec: dict[str, Any]) -> Any:
    """The model, wrapped as its authors do in their scripts."""
    from transformers import AutoModelForCausalLM

    sys.path.insert(0, str(checkout / "src"))
    from streambp.stream_model import StreamModel

    model = AutoModelForCausalLM.from_pretrained(spec["source"], torch_dtype=getattr(torch, spec["dtype"]))
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # no pages of a mapped file
    wrapped = StreamModel(
        model.to(spec["device"]).train(),
        gradient_accumulation_steps=1,
        logits_chunk_size=LOGITS_CHUNK,
        stream_checkpoint=True,
        checkpoint_chunk_size=spec["chunk"],
    )
    wrapped.gradient_checkpointing_enable()
    return wrapped.train()


def main() -> None:
    """Warm up, then measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkout", type=Path, required=True)
    parser.add_argument("--what", choices=("peak", "time"), required=True)
    parser.add_argument("--json", type=json.loads, required=True)
    args = parser.parse_args()
    spec, measure = args.json, meter()
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def emit(event: str, **fields: Any) -> None:
        out.write(json.dumps({"event": event, **fields}) + "\n")

    torch.manual_seed(spec["seed"])
    if spec["threads"]:
        torch.set_num_threads(spec["threads"])
    model = load_model(args.checkout, spec)
    vocab = model.model.get_input_embeddings().weight.shape[0]
    shape = (spec["batch_size"], spec["seq_len"])
    generator = torch.Generator().manual_seed(spec["seed"])
    ids = torch.randint(vocab, (shape[0] * shape[1],), generator=generator).view(shape).to(spec["device"])
    losses: list[float] = []

    def step() -> None:
        """Its forward runs the backward as well. As in its scripts it gets a mask.

        Without one its later chunks are given to the kernel as causal from the first row on, which is not so.
        """
        output = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, use_cache=False)
        if output.loss.requires_grad:
            output.loss.backward()
        losses.append(output.loss.item())

    results = []
    for index in range(spec["steps"] + 1):
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.zero_()
        with measure.turn(spec["turn_file"]):
            measured = measure.measure_step(step, spec["device"])
        if index == 0:
            emit("warm")
            continue
        figures = {"seconds": measured.seconds, "peak_bytes": measured.peak_bytes}
        emit("step", index=index - 1, loss=losses[-1], **figures)
        results.append(figures)
    emit(
        "done",
        seconds=statistics.median(r["seconds"] for r in results),
        peak_bytes=max(r["peak_bytes"] for r in results),
        losses=losses[1:],
        notes=[],
    )


if __name__ == "__main__":
    main()
