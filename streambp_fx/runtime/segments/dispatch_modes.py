"""Dispatch modes that somebody has entered around a step: they see each op, and may change what it gives."""

from __future__ import annotations

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

# Modes that are known to leave results as they are: they count or log. A user's says so of itself.
OBSERVERS = (
    "streambp_fx.",
    "torch.cuda._sanitizer.",
    "torch.distributed._tools.",
    "torch.distributed.tensor.debug.",
    "torch.utils.flop_counter.",
)
OWN_WORD = "only_observes"
MAY_CHANGE = (
    "is a dispatch mode, which may change what ops give (if it does not, set its only_observes to True)"
)


def mode_that_may_change() -> str | None:
    """Name of a dispatch mode that may change what ops give, if one is active.

    NOTE [dispatch modes around a step]: eager shows a mode each op of the model. A streamed step has other
    ops (a product that is added to a gradient, attention by blocks), on chunks, so with a mode that changes
    what `mm` gives it would be another function than eager's. PyTorch's own modes that trace
    (`is_infra_mode`) are none of these.
    """
    for mode in _get_current_dispatch_mode_stack():
        kind = type(mode)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if not (kind.is_infra_mode() or getattr(mode, OWN_WORD, False) or name.startswith(OBSERVERS)):
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
