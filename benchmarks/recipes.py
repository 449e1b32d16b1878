"""What is predicted of the recipes at their real sizes: `python -m benchmarks.recipes [--docs]`.

Nothing is run, and no weight is allocated: models are on the meta device. TRL's loss head is put on those
that TRL trains, so that the step that is planned is the one that runs. Takes some minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from streambp_fx.commands.recipe import find, sequence_length
from streambp_fx.options import Options
from streambp_fx.plan import Plan, Planner, model_on_meta

PAGE = Path(__file__).parents[1] / "docs" / "recipes.md"
BEGIN, END = (
    "<!-- predicted: written by python -m benchmarks.recipes --docs -->",
    "<!-- end of what is predicted -->",
)
#: What TRL's trainers ask of their loss head, beside the log-probabilities.
HEADS = {"sft": ("log_probs", "entropy", "is_top1"), "grpo": ("log_probs", "entropy")}
HEADS["dpo"] = HEADS["sft"]
GIB = 2**30
#: Of a GPU's memory, what is left to tensors: CUDA itself and what lies unused between tensors take the rest.
LEFT = {"24GB": "22GiB", "48GB": "44GiB", "80GB": "74GiB"}


@dataclass(frozen=True)
class Case:
    """A recipe at its real size.

    Attributes:
        recipe: its name.
        gpu: a key of `LEFT`.
        model: a name that `streambp_fx.plan` knows.
        head: a key of `HEADS`; None: the model's own loss.
        lora_rank: of adapters; None: all weights are trained.
        mixed: float32 weights under autocast in bfloat16; else the weights are in bfloat16.
        batch_size: sequences that are in a step at once.
        settings: arguments of the recipe's `train` that are not the defaults.
    """

    recipe: str
    gpu: str
    model: str = "Qwen3-8B"
    head: str | None = "sft"
    lora_rank: int | None = 16
    mixed: bool = False
    batch_size: int = 1
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def train(self) -> Any:
        """The recipe's function."""
        return find(self.recipe).train()

    @property
    def seq_len(self) -> int:
        """Tokens of a sequence, as the script says."""
        return sequence_length(self.train, dict(self.settings))

    @property
    def offload(self) -> str:
        """Where what is kept lies, as the script says."""
        return {**self.train.__kwdefaults__, **dict(self.settings)}["offload"]

    @property
    def built(self) -> tuple[Any, ...]:
        """What the graph depends on: cases that share it are captured once."""
        return self.model, self.head, self.lora_rank, self.mixed, self.batch_size


def _on(gpu: str, **settings: Any) -> Case:
    return Case("sft-lora", gpu, settings=(("gpu", gpu), *settings.items()))


WHOLE: dict[str, Any] = {"model": "Qwen2.5-1.5B", "lora_rank": None, "mixed": True}
CASES = (
    _on("24GB"),
    _on("24GB", offload="host", seq_len=131_072),
    _on("48GB"),
    _on("80GB"),
    Case("full-finetune", "80GB", **WHOLE),
    Case("dpo", "80GB", head="dpo", batch_size=2),
    Case("grpo", "80GB", head="grpo"),
    Case("continued-pretraining", "48GB", head=None, **WHOLE),
)


def step_model(source: str | Path, case: Case, dtype: str | None = None) -> nn.Module:
    """The model as the recipe's trainer runs it, without weights.

    Args:
        source: see `model_on_meta`.
        case: what is put on it.
        dtype: of the weights; None: that of the case.
    """
    model = model_on_meta(source, dtype or ("float32" if case.mixed else "bfloat16"), case.lora_rank)
    if case.head is not None:
        from trl.trainer.utils import add_fused_lm_head

        base: Any = model.get_base_model() if case.lora_rank else model  # type: ignore[operator]
        add_fused_lm_head(base, outputs=HEADS[case.head])
        base.forward.__func__.__kwdefaults__["fused_lm_head"] = True  # as the trainer calls it
    return model


def planner(case: Case, source: str | Path | None = None, dtype: str | None = None) -> Planner:
    """Plans of the step of a case, from its graph; see `step_model` for the arguments."""
    torch._dynamo.reset()
    context = torch.autocast("cpu", torch.bfloat16) if case.mixed else contextlib.nullcontext()
    with context:
        return Planner(step_model(source or case.model, case, dtype), case.batch_size, None, Options().stored)


def plans() -> list[tuple[Case, Plan]]:
    """A plan for each case: its length, and the longest that fits."""
    made: dict[tuple[Any, ...], Planner] = {}
    found = []
    for case in CASES:
        if case.built not in made:
            made[case.built] = planner(case)
        own = made[case.built].use(Options(offload=case.offload).stored)
        found.append((case, own.plan(case.model, case.seq_len, LEFT[case.gpu], optimizer="adamw")))
    return found


def cache_bytes(case: Case, sequences: int = 8) -> int:
    """Bytes of the keys and values of so many sequences, as generation keeps them in bfloat16."""
    config: Any = model_on_meta(case.model).config
    width = config.num_key_value_heads * config.head_dim
    return 2 * 2 * config.num_hidden_layers * width * case.seq_len * sequences


def table(found: Sequence[tuple[Case, Plan]]) -> list[str]:
    """A table in Markdown, and a line on the memory of generation."""
    titles = (
        "recipe",
        "model",
        "GPU",
        "tokens",
        "predicted peak",
        "kept elsewhere",
        "longest",
        "work of a step",
    )
    rows = [titles, ("---",) * len(titles)]
    for case, plan in found:
        options = "".join(f" --{n.replace('_', '-')} {v}" for n, v in case.settings)
        tokens = f"{plan.seq_len:,}" if case.batch_size == 1 else f"{case.batch_size} x {plan.seq_len:,}"
        place = f"{plan.offloaded_bytes / GIB:.1f} GiB, {case.offload}" if plan.offloaded_bytes else "-"
        peak = f"{plan.peak_bytes / GIB:.1f} of {LEFT[case.gpu].removesuffix('GiB')} GiB"
        sizes = (tokens, peak if plan.fits else f"{peak}: too much", place, f"{plan.max_seq_len:,}")
        rows.append(
            (f"`{case.recipe}{options}`", case.model, case.gpu, *sizes, f"{plan.flops / 1e15:.1f} PFLOP")
        )
    drawn = next(case for case in CASES if case.recipe == "grpo")
    cache = f"{cache_bytes(drawn) / GIB:.1f} GiB"
    said = f"While `grpo` draws 8 completions of {drawn.seq_len:,} tokens, their keys and values take {cache}"
    return [*("| " + " | ".join(row) + " |" for row in rows), "", f"{said} beside the weights."]


def section() -> str:
    """What is between the two marks of the page."""
    page = PAGE.read_text()
    return page[page.index(BEGIN) + len(BEGIN) : page.index(END)].strip()


def write(lines: Sequence[str]) -> None:
    """Put lines between the two marks of the page."""
    page = PAGE.read_text()
    before, after = page[: page.index(BEGIN) + len(BEGIN)], page[page.index(END) :]
    PAGE.write_text(before + "\n\n" + "\n".join(lines) + "\n\n" + after)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, or write it into the page.

    Returns:
        the exit status: 0.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recipes", description=__doc__)
    parser.add_argument("--docs", action="store_true", help="write the table into docs/recipes.md")
    args = parser.parse_args(argv)
    lines = table(plans())
    print("\n".join(lines))
    if args.docs:
        write(lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
