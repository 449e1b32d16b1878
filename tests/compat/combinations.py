"""Which versions are tried together, and which of them are newest."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Combination:
    """Versions that are tried together, as they begin ("2.11" is any 2.11.x); "" is the newest.

    TRL 1.16 needs Python 3.11: None is none.
    """

    python: str
    torch: str
    transformers: str
    trl: str | None = ""

    @property
    def name(self) -> str:
        """Of its environment."""
        found = ["none" if v is None else v or "newest" for v in (self.torch, self.transformers, self.trl)]
        return "py{}-torch{}-transformers{}-trl{}".format(self.python, *found)

    def requirements(self) -> list[str]:
        """What an installer is asked for."""
        wanted = {"torch": self.torch, "transformers": self.transformers, "trl": self.trl}
        return [
            f"{name}=={version}.*" if version else name
            for name, version in wanted.items()
            if version is not None
        ]

    def has(self, text: str) -> bool:
        """True if `NAME=VERSION` is one of its versions: "python=3.12", "torch=2.11", "torch=newest"."""
        name, _, version = text.partition("=")
        return getattr(self, name) == ("" if version == "newest" else version)


#: Each PyTorch and each transformers at least once, the oldest together, the newest together, and each oldest
#: with the other's newest.
COMBINATIONS = (
    Combination("3.10", "2.11", "5.0", None),
    Combination("3.13", "", ""),
    Combination("3.12", "2.11", ""),
    Combination("3.12", "", "5.0", "1.16"),
    Combination("3.12", "2.12", "5.10"),
    Combination("3.11", "2.13", "5.23"),
    Combination("3.13", "2.14", "5.10"),
)
