"""Which versions work? An environment for each combination, the subset in it, and docs/versions.md.

    make compat                               # all of them: some ten minutes each on one core
    make compat ARGS="--only torch=2.11"      # those with that version; may be given several times
    make compat ARGS="--list"

Ends with status 1 if a test failed or an environment could not be made.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import time
from pathlib import Path
from typing import Any

from .combinations import COMBINATIONS, Combination
from .environments import ROOT, NotInstalled, install, interpreter, remove, run_subset, versions
from .table import IN_README, PAGE, README, RECORD, in_readme, page, record, result


def main() -> int:
    options = _options()
    chosen = [c for c in COMBINATIONS if all(c.has(only) for only in options.only)]
    if options.list:
        print("\n".join(c.name for c in chosen))
        return 0
    if options.page:
        write_page()
        return 0
    right = True
    for combination in chosen:
        print(f"---- {combination.name}", flush=True)
        right &= _tried(combination)
        if options.remove:
            remove(combination)
    return 0 if right else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make compat", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", action="append", default=[], metavar="NAME=VERSION")
    parser.add_argument("--list", action="store_true", help="print the names, and run nothing")
    parser.add_argument("--page", action="store_true", help="write the page of what is kept, and run nothing")
    parser.add_argument("--remove", action="store_true", help="delete each environment once it was used")
    return parser.parse_args()


def _tried(combination: Combination) -> bool:
    """True if it is right, or if there is no Python for it."""
    python = interpreter(combination.python)
    if python is None:
        print(f"no Python {combination.python}: left out")
        return True
    try:
        own = install(combination, python)
    except NotInstalled as error:
        print(f"cannot be installed:\n{error}")
        return False
    begun = time.monotonic()
    report = run_subset(own)
    if not report:
        print("the subset did not end")
        return False
    found = result(versions(own), report, time.monotonic() - begun)
    record(found)
    write_page()
    return not found["failed"]


def constant(path: Path, name: str) -> Any:
    """A constant of a module that is not imported: it needs what only the environments have."""
    statements = ast.parse(path.read_text()).body
    found = [s for s in statements if isinstance(s, ast.Assign) and ast.unparse(s.targets[0]) == name]
    return ast.literal_eval(found[0].value)


def write_page() -> None:
    """Make docs/versions.md of what is kept, and what the README says of it."""
    minimum = constant(ROOT / "streambp_fx" / "versions" / "__init__.py", "MINIMUM")
    families = constant(ROOT / "tests" / "compat" / "test_subset.py", "FAMILIES")
    kept = json.loads(RECORD.read_text())
    PAGE.write_text(page(kept, minimum, families))
    README.write_text(IN_README.sub(in_readme(kept), README.read_text()))


if __name__ == "__main__":
    sys.exit(main())
