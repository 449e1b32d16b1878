"""Ratios against checkpointing: what a case requires, and what was recorded before."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .cases import WITHIN, Case
from .errors import BenchmarkError
from .measuring import Result

RECORDED = Path(__file__).with_name("recorded.json")
TOLERANCE = 0.10


@dataclass(frozen=True)
class Ratio:
    """One mode against a peer in the same run.

    Attributes:
        memory: how many times less the mode's peak is than the peer's.
        time: the mode's median time as a share of the peer's.
    """

    memory: float | None
    time: float | None

    @staticmethod
    def of(mode: Result | None, peer: Result | None) -> Ratio:
        """None for what either has not been measured in."""
        if mode is None or peer is None:
            return Ratio(None, None)
        memory = peer.peak_bytes / mode.peak_bytes if mode.peak_bytes and peer.peak_bytes else None
        own, other = mode.median, peer.median
        return Ratio(memory, own / other if own and other else None)

    def as_dict(self) -> dict[str, float | None]:
        """Ready for JSON."""
        return {"memory": self.memory, "time": self.time}


def met(case: Case, ratio: Ratio) -> bool | None:
    """Whether the case's requirements are reached; None: nothing is required, or it was not measured."""
    wanted = (case.memory_at_least, ratio.memory), (case.time_at_most, ratio.time)
    if any(limit is None or value is None for limit, value in wanted):
        return None
    assert case.memory_at_least is not None and ratio.memory is not None
    assert case.time_at_most is not None and ratio.time is not None
    return ratio.memory >= case.memory_at_least and ratio.time <= case.time_at_most


def near(own: Result | None, beside: Result | None) -> bool | None:
    """Whether peak and time are at most 15% above those of the mode beside; None: not measured."""
    ratio = Ratio.of(own, beside)
    if ratio.memory is None or ratio.time is None:
        return None
    return ratio.memory >= 1 / WITHIN and ratio.time <= WITHIN


# ---- recorded ratios


@dataclass(frozen=True)
class Finding:
    """One recorded ratio and what is measured now.

    Attributes:
        what: "memory" or "time".
        recorded, measured: the ratios; None: not recorded, or not measured now.
        worse_by: relative growth of the peak or of the time; below zero: better.
    """

    case: str
    mode: str
    what: str
    recorded: float | None
    measured: float | None
    tolerance: float

    @property
    def worse_by(self) -> float | None:
        if not self.recorded or not self.measured:
            return None
        better = self.measured / self.recorded if self.what == "memory" else self.recorded / self.measured
        return 1 / better - 1

    @property
    def ok(self) -> bool:
        """What was recorded is measured, and not worse by more than the tolerance; what is new is fine."""
        if self.recorded is None:
            return True
        worse = self.worse_by
        return worse is not None and worse <= self.tolerance


Ratios = dict[str, dict[str, dict[str, Any]]]


def compare(measured: Ratios, recorded: Ratios, tolerance: float = TOLERANCE) -> list[Finding]:
    """All recorded and all measured ratios, by case and mode."""
    keys = [
        (case, mode, what)
        for source in (recorded, measured)
        for case in source
        for mode in source[case]
        for what in ("memory", "time")
    ]

    def value(source: Ratios, case: str, mode: str, what: str) -> float | None:
        return source.get(case, {}).get(mode, {}).get(what)

    return [
        Finding(*key, recorded=value(recorded, *key), measured=value(measured, *key), tolerance=tolerance)
        for key in dict.fromkeys(keys)
    ]


def read_recorded(path: Path = RECORDED) -> Ratios:
    """The recorded ratios.

    Raises:
        BenchmarkError: there is no such file, or it is not one that `--record` writes.
    """
    try:
        return json.loads(path.read_text())["ratios"]
    except OSError as error:
        raise BenchmarkError(f"no ratios are recorded in {path}: run with --record ({error})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise BenchmarkError(f"{path} holds no recorded ratios: run with --record") from error


def write_recorded(ratios: Ratios, environment: dict[str, Any], path: Path = RECORDED) -> None:
    """Keep ratios for later comparisons."""
    rounded = {
        case: {m: {k: None if v is None else round(v, 3) for k, v in r.items()} for m, r in modes.items()}
        for case, modes in ratios.items()
    }
    path.write_text(json.dumps({"environment": environment, "ratios": rounded}, indent=2) + "\n")
