"""The process in which one training step of a benchmark is measured.

python -m benchmarks.worker --what WHAT --json SPEC
"""

from __future__ import annotations

import sys

from streambp_fx.measure.worker import main

from .build import PeerSpec, build

if __name__ == "__main__":
    sys.exit(main(spec_type=PeerSpec, build=build))
