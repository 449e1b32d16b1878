"""Where a model may come from. Nothing here imports PyTorch: a command says at once that there is none."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from ..errors import PlanError
from ..units import did_you_mean
from .known import PACKAGE, known_models

SMOLLM2 = "smollm2"


class ModelSourceError(ValueError):
    """A model source names nothing that can be loaded."""


def check_source(source: str) -> None:
    """Check that `source` can be a model source, without loading anything.

    Raises:
        ModelSourceError: it is neither "smollm2" nor an existing directory or file. Nothing is ever
            downloaded, so the name of a model on a hub is no source.
    """
    if source == SMOLLM2:
        return
    path = Path(source).expanduser()
    if not path.exists():
        raise ModelSourceError(
            f"model {source!r}: no such file or directory (give {SMOLLM2!r}, a directory with config.json, "
            "or a config.json; models are not downloaded)"
        )
    if path.is_dir() and not (path / "config.json").is_file():
        raise ModelSourceError(f"model {source!r}: the directory holds no config.json")


def config_file(source: str) -> Path:
    """The config of a model.

    Args:
        source: a name of `known_models` (an organisation before a slash is ignored), a directory with
            config.json, or a config file.

    Raises:
        PlanError: no such model.
    """
    path = Path(source).expanduser()
    if path.exists():
        return path / "config.json" if path.is_dir() else path
    name = source.rsplit("/", 1)[-1].lower()
    for known in known_models():
        if known.lower() == name:
            return Path(str(resources.files(PACKAGE) / "configs" / f"{known}.json"))
    raise PlanError(
        f"model {source!r}: no such file or directory, and none of the models that are known by name "
        f"({', '.join(known_models())}).{did_you_mean(source.rsplit('/', 1)[-1], known_models())}"
    )
