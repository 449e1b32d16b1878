"""Dispatch modes that somebody has entered around a step: they see each op, and may change what it gives."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

# Modes that are known to leave results as they are: they count or log. A user's says so of itself.
OBSERVERS = (
    "streambp_fx.",
    "torch.cuda._sanitizer.",
    "torch.distributed._tools.",
    "torch.distributed.tensor.debug.",
    "torch.utils.flop_counter.",
)
MAY_CHANGE = (
    "is a dispatch mode, which may change what ops give (if it does not, set its only_observes to True)"
)


def active_modes() -> list[tuple[str, TorchDispatchMode]]:
    """The dispatch modes that are active, with their names, but for PyTorch's own that trace."""
    modes = [m for m in _get_current_dispatch_mode_stack() if not m.is_infra_mode()]
    return [(f"{type(m).__module__}.{type(m).__qualname__}", m) for m in modes]


def mode_that_may_change() -> str | None:
    """Name of a dispatch mode that may change what ops give, if one is active.

    NOTE [dispatch modes around a step]: eager shows a mode each op of the model. A streamed step has other
    ops (a product that is added to a gradient, attention by blocks), on chunks, so with a mode that changes
    what `mm` gives it would be another function than eager's.
    """
    for name, mode in active_modes():
        if not (getattr(mode, "only_observes", False) or name.startswith(OBSERVERS)):
            return name
    return None


def refuse_modes_in_backward() -> None:
    """Raise in the backward of a streamed step within such a mode, in which the forward was not.

    Raises:
        RuntimeError: says which, and what to do.
    """
    mode = mode_that_may_change()
    if mode is not None:
        raise RuntimeError(
            f"{mode} {MAY_CHANGE}. It is active in the backward of a step that was streamed without it. "
            "Enter it before the forward, and the step runs unstreamed, or call streambp_fx.restore(model)."
        )
