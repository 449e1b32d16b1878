"""Which modules of a model are its layers."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def layers_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers of a model with their names: what is in a list of modules that is in no other."""
    found: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        within = any(name.startswith(f"{outer}.") for outer, _ in found)
        if isinstance(module, nn.ModuleList) and not within:
            found += [(f"{name}.{key}", layer) for key, layer in module.named_children()]
    return found


def owners(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers of a model, then what else has parameters of its own, with their names.

    It depends on the modules alone, and so is the same on all devices.
    """
    yield from layers_of(model)
    yield from ((name or type(model).__name__, m) for name, m in model.named_modules() if m._parameters)
