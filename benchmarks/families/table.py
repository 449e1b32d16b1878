"""The table of families, as Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

HEADER = (
    "| family | exact (none, right, left) | chunked | times less | without gradients | first step "
    "| what is not streamed |"
)


LONGEST = 240
PAGE = """# Families

Every causal language model of transformers that can be built at a tiny size (a few layers of width 64,
feed-forward layers of 1024 or experts of that many in all), as `python -m benchmarks.families` measures it:

- the relative error of loss and gradients against eager PyTorch in float64, on 67 tokens without padding and
  with padding on either side;
- how many segments are chunked;
- the live bytes of a step of 1024 tokens with Hugging Face gradient checkpointing over those of the streamed
  step with chunks of 64, gradients included, and without the gradients of the parameters, which both hold (at
  this size they are up to half of what the streamed step holds: no schedule can go below them);
- the time of the first step, which compiles;
- where something is not streamed, the first reason.

"""


def page(results: Sequence[dict[str, Any]], how: str = "") -> str:
    """The page of the documentation; `how` says with what it was measured."""
    return f"{PAGE}{how}\n\n{table(sorted(results, key=lambda r: r['family']))}\n".replace("\n\n\n\n", "\n\n")


def table(results: Sequence[dict[str, Any]], header: bool = True) -> str:
    """A row for each family; a last one that counts."""
    rows = [_row(r) for r in results]
    if not header:
        return "\n".join(rows)
    return "\n".join([HEADER, "|---|---|---|---|---|---|---|", *rows, "", _summary(results)])


def ratio(result: dict[str, Any]) -> float | None:
    """Live bytes of checkpointing over those of the streamed step."""
    live = result.get("live")
    return live["checkpointing"] / live["streamed"] if live else None


def ratio_without_gradients(result: dict[str, Any]) -> float | None:
    """The same ratio of what is held beside the gradients of parameters."""
    live = result.get("live")
    if not live or "gradients" not in live:
        return None
    return (live["checkpointing"] - live["gradients"]) / (live["streamed"] - live["gradients"])


def _row(result: dict[str, Any]) -> str:
    live, exact = result.get("live"), result.get("exact")
    errors = ", ".join(_number(e) for e in exact.values()) if exact else "-"
    chunked = f"{live['chunked']} of {live['segments']}" if live else "-"
    less = ["-" if r is None else f"{r:.2f}" for r in (ratio(result), ratio_without_gradients(result))]
    first = f"{live['first step seconds']:.0f} s" if live else "-"
    cells = (result["family"], errors, chunked, *less, first, _why(result))
    return f"| {' | '.join(cells)} |"


def _number(error: Any) -> str:
    return f"{error:.0e}" if isinstance(error, float) else str(error)


def _why(result: dict[str, Any]) -> str:
    failures = [str(result[k]) for k in ("error", "live error", "exact error") if k in result]
    lines = [*failures, *(_reason(w) for w in result.get("warnings", []))]
    words = (" ".join(re.sub(r"/\S*site-packages/", "", line).split()).replace("|", "/") for line in lines)
    return "; ".join(dict.fromkeys(w if len(w) < LONGEST else f"{w[:LONGEST]}..." for w in words))


def _reason(warning: str) -> str:
    """What a warning says of the first op, without what all of them say."""
    return re.sub(r"^.*held for the whole sequence while they are recomputed:", "", warning, flags=re.S)


def _summary(results: Sequence[dict[str, Any]]) -> str:
    wrong = [r["family"] for r in results if any(_is_wrong(e) for e in (r.get("exact") or {}).values())]
    failed = [r["family"] for r in results if "live" not in r or "exact" not in r]
    ratios = {r["family"]: x for r in results if (x := ratio(r)) is not None}
    worse = [f for f, x in ratios.items() if x < 1]
    streamed = sum(r["live"]["chunked"] == r["live"]["segments"] > 0 for r in results if "live" in r)
    far = sum(x >= 4 for x in ratios.values())
    return (
        f"{len(results)} families: {len(wrong)} wrong {wrong}, {len(failed)} without a result {failed}, "
        f"{len(worse)} above checkpointing {worse}, {streamed} with all segments chunked, {far} 4 times less"
    )


def _is_wrong(error: Any) -> bool:
    return isinstance(error, float) and not error < 1e-9
