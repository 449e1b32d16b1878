"""The models whose configs come with the package. Nothing here imports PyTorch: the command's help asks."""

from __future__ import annotations

from importlib import resources

PACKAGE = __name__.split(".")[0]


def known_models() -> list[str]:
    """Names of the models whose configs come with the package."""
    folder = resources.files(PACKAGE) / "configs"
    return sorted(f.name.removesuffix(".json") for f in folder.iterdir() if f.name.endswith(".json"))
