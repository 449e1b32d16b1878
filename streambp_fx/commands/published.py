"""The longest sequences that were published for StreamBP, beside those that a plan finds."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from ..plan import Plan, plan

# One NVIDIA A800 with 80 GB, bfloat16.
PUBLISHED_MEMORY = "80GB"
LORA_RANK = 32


@dataclass(frozen=True)
class PublishedLengths:
    """The longest sequence of one model on 80 GB in tokens, by how its activations are kept.

    Source: Luo, Li, Zhao, Li, "StreamBP: Memory-Efficient Exact Backpropagation for Long Sequence Training
    of LLMs", NeurIPS 2025, arXiv 2506.03077, figure 1.

    Attributes:
        model: a name that `streambp_fx.plan` knows.
        lora_rank: LoRA adapters were trained; None: all weights were.
        eager: nothing is recomputed.
        checkpointing: gradient checkpointing.
        streamed: the published StreamBP.
    """

    model: str
    lora_rank: int | None
    eager: int
    checkpointing: int
    streamed: int

    @property
    def tokens(self) -> tuple[int, int, int]:
        """Eager, checkpointing, streamed."""
        return self.eager, self.checkpointing, self.streamed


PUBLISHED = (
    PublishedLengths("Qwen3-8B", None, 4_700, 20_000, 110_000),
    PublishedLengths("Qwen3-14B", None, 1_700, 9_000, 40_000),
    PublishedLengths("Qwen3-32B", LORA_RANK, 440, 5_700, 16_000),
)
KINDS = ("nothing recomputed", "gradient checkpointing", "streamed")


def published_for(model: str) -> PublishedLengths | None:
    """What was published for a model, by its name."""
    return next((p for p in PUBLISHED if p.model.lower() == model.lower()), None)


def predicted(found: Plan) -> tuple[int, int, int]:
    """The longest sequences of a plan with a budget, tokens: eager, checkpointing, streamed."""
    return found.eager_seq_len or 0, found.checkpointing_seq_len or 0, found.max_seq_len or 0


def print_published(as_json: bool = False, console: Console | None = None, **choices: Any) -> None:
    """Plan each published model for 80 GB and print what is found beside what was published.

    Takes a few minutes; no weight is allocated.

    Args:
        as_json: print a list of objects with `published` and `predicted`.
        console: where the table goes; None: standard output.
        choices: further arguments of `streambp_fx.plan`, the same for all models.

    Raises:
        PlanError: see `streambp_fx.plan`.
    """
    both = [(p, plan(p.model, memory=PUBLISHED_MEMORY, lora_rank=p.lora_rank, **choices)) for p in PUBLISHED]
    if as_json:
        print(json.dumps([{"published": asdict(p), "predicted": f.as_dict()} for p, f in both], indent=2))
        return
    console = console or Console(highlight=False)
    console.print(_table(both))


def _table(both: list[tuple[PublishedLengths, Plan]]) -> Table:
    title = f"longest sequence on {PUBLISHED_MEMORY}, thousands of tokens: predicted | published"
    table = Table(title=title)
    table.add_column("")
    for heading in KINDS:
        table.add_column(heading, justify="right")
    for each, one in both:
        name = each.model + (f", LoRA {each.lora_rank}" if each.lora_rank else "")
        pairs = zip(predicted(one), each.tokens, strict=True)
        table.add_row(name, *(f"{_thousands(own)} | {_thousands(other)}" for own, other in pairs))
    return table


def _thousands(tokens: int) -> str:
    return f"{tokens / 1000:,.0f}" if tokens >= 10_000 else f"{tokens / 1000:.2g}"
