"""The table of all families: `python -m benchmarks.families [FAMILY...] [--out FILE] [--workers N]`.

`--read FILE... --page docs/families.md` makes the page of the documentation of what was measured before.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from .configs import families
from .table import page, table

LIMIT = 900


def measured(family: str) -> dict[str, Any]:
    """What the worker found of one family, or that it did not end or crashed."""
    command = [sys.executable, "-m", "benchmarks.families.worker", family]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        return {"family": family, "error": f"no result in {LIMIT} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        return {"family": family, "error": done.stderr.strip()[-600:] or f"ended with {done.returncode}"}
    return json.loads(lines[-1])


def main() -> None:
    """Measure families, each in a process of its own, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.families", description=__doc__)
    parser.add_argument("family", nargs="*", help="model types of transformers; all of them if none is named")
    parser.add_argument("--out", type=Path, default=Path("build/families.jsonl"), help="a line for each")
    parser.add_argument("--workers", type=int, default=1, help="processes at a time (1)")
    parser.add_argument("--read", type=Path, nargs="+", help="results of earlier runs; nothing is measured")
    parser.add_argument("--page", type=Path, help="with --read: write a page of them")
    parser.add_argument("--how", default="", help="with --page: what it was measured with")
    args = parser.parse_args()
    if args.read:
        lines = (line for path in args.read for line in path.read_text().splitlines())
        known = {r["family"]: r for r in map(json.loads, lines)}  # the last one of a family counts
        print(table(list(known.values())))
        if args.page:
            args.page.write_text(page(list(known.values()), args.how))
        return
    args.out.parent.mkdir(parents=True, exist_ok=True)
    found = []
    with concurrent.futures.ThreadPoolExecutor(args.workers) as pool, args.out.open("w") as file:
        for result in pool.map(measured, args.family or families()):
            found.append(result)
            file.write(json.dumps(result) + "\n")
            file.flush()
            print(table([result], header=False), flush=True)
    print(table(found))


if __name__ == "__main__":
    main()
