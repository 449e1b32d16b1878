"""The table of families, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

HEADER = "| family | exact (none, right, left) | chunked | times less | first step | what is not streamed |"


def table(results: Sequence[dict[str, Any]], header: bool = True) -> str:
    """A row for each family; a last one that counts."""
    rows = [_row(r) for r in results]
    if not header:
        return "\n".join(rows)
    return "\n".join([HEADER, "|---|---|---|---|---|---|", *rows, "", _summary(results)])


def ratio(result: dict[str, Any]) -> float | None:
    """Live bytes of checkpointing over those of the streamed step."""
    live = result.get("live")
    return live["checkpointing"] / live["streamed"] if live else None


def _row(result: dict[str, Any]) -> str:
    live, exact = result.get("live"), result.get("exact")
    errors = ", ".join(_number(e) for e in exact.values()) if exact else "-"
    chunked = f"{live['chunked']} of {live['segments']}" if live else "-"
    less = ratio(result)
    first = f"{live['first step seconds']:.0f} s" if live else "-"
    cells = (result["family"], errors, chunked, "-" if less is None else f"{less:.2f}", first, _why(result))
    return f"| {' | '.join(cells)} |"


def _number(error: Any) -> str:
    return f"{error:.0e}" if isinstance(error, float) else str(error)


def _why(result: dict[str, Any]) -> str:
    failures = [str(result[k]) for k in ("error", "live error", "exact error") if k in result]
    lines = [*failures, *result.get("warnings", [])]
    return "; ".join(" ".join(line.split()).replace("|", "/")[:400] for line in lines)


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
