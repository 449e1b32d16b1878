"""Does the suite notice a wrong compiler? Small wrong changes, one at a time, and the tests that should fail.

    make mutants                              # the hand-picked ones, and a sample of all: a night
    make mutants ARGS="--hand-picked"         # those alone
    make mutants ARGS="--count 20 --module axes"

Each mutant is tried in a process that is forked from one which has imported everything but the package. Tests
run from the nearest to the farthest until one fails. Ends with status 1 if a hand-picked mutant survives, or
if fewer than 95% of the others are caught, but for those that are known to change nothing (`equivalent.py`).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from .changes import Mutant, mutants_of
from .equivalent import EQUIVALENT
from .hand_picked import hand_picked
from .nearest import MODULES, tests_of

ROOT = Path(__file__).parents[2]
WANTED = 0.95
# Seconds that a mutant's tests may take. One that takes longer may hang or may pass: it is not caught.
LIMIT = 2700


def main() -> int:
    options = _options()
    chosen = [m for m in hand_picked(ROOT) if options.module is None or options.module in m.path]
    must = {str(m) for m in chosen}
    if not options.hand_picked:
        paths = [p for p in MODULES if options.module is None or options.module in p]
        every = [m for path in paths for m in mutants_of(path, ROOT) if str(m) not in EQUIVALENT]
        chosen += random.Random(options.seed).sample(every, min(options.count, len(every)))
    _preload()
    with multiprocessing.get_context("fork").Pool(options.workers) as pool:
        caught = pool.map(_announced, chosen, chunksize=1)
    return _report(list(zip(chosen, caught, strict=True)), must)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make mutants", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--hand-picked", action="store_true", help="those alone")
    parser.add_argument("--module", help="modules whose path contains this")
    parser.add_argument("--count", type=int, default=400, help="how many of all mutants are tried")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--workers", type=int, default=2)
    return parser.parse_args()


def _preload() -> None:
    """Import what every test imports, but not the package."""
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import torch
    import torch._dynamo
    import torch._functorch.aot_autograd
    import transformers  # noqa: F401

    torch.set_num_threads(1)


def _announced(mutant: Mutant) -> bool:
    start = time.perf_counter()
    found = _outcome(mutant)
    print(f"{found:8} {time.perf_counter() - start:5.0f} s  {mutant}", flush=True)
    return found == "caught"


def _outcome(mutant: Mutant) -> str:
    """What came of it: "caught" if a test fails, "SURVIVED" if none does, "too long" if they do not end."""
    with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False) as file:
        file.write(mutant.source)
    try:
        child = os.fork()
        if child == 0:
            _run_tests(mutant, file.name)
        return _status(child)
    finally:
        os.unlink(file.name)


def _status(child: int) -> str:
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return "caught" if status else "SURVIVED"
        time.sleep(0.2)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "too long"


def _run_tests(mutant: Mutant, changed: str) -> None:
    """In the child: never returns."""
    import pytest

    from .overlay import VARIABLE, Overlay

    setting = f"{_module_name(mutant.path)}={changed}"
    os.environ[VARIABLE] = setting
    sys.meta_path.insert(0, Overlay(setting))
    os.chdir(ROOT)
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(null, stream)
    status = 0
    try:
        for selection in tests_of(mutant.path):
            status = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *selection]))
            if status not in (0, 5):  # 5: the selection has no test
                break
        else:
            status = 0
    except BaseException:
        status = 1
    os._exit(0 if status == 0 else 1)


def _module_name(path: str) -> str:
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return f"streambp_fx.{name}" if name.startswith("passes") else name


def _report(results: list[tuple[Mutant, bool]], must: set[str]) -> int:
    survived = [m for m, caught in results if not caught]
    by_module = Counter(m.path for m, _ in results)
    lost = Counter(m.path for m in survived)
    print(f"\n{'module':40} {'mutants':>8} {'caught':>8}")
    for path, count in sorted(by_module.items()):
        print(f"{path:40} {count:8} {(count - lost[path]) / count:8.0%}")
    picked = [m for m in survived if str(m) in must]
    others = [caught for m, caught in results if str(m) not in must]
    share = sum(others) / len(others) if others else 1.0
    print(f"\n{len(results) - len(survived)} of {len(results)} caught; of those not hand-picked {share:.1%}")
    for mutant in survived:
        print(f"survived: {mutant}{' (hand-picked)' if mutant in picked else ''}")
    return 1 if picked or share < WANTED else 0


if __name__ == "__main__":
    sys.exit(main())
