"""Why a captured graph cannot be run in chunks: it does more than to compute values."""

from __future__ import annotations

from torch.fx import Node

ASKS = "its code asks the values of a tensor whether"


class NotPureError(Exception):
    """The graph does something beside computing values, which a step in chunks could not do as eager does.

    Attributes:
        reason: why.
        node: the op of the Dynamo graph that does, if it is known.
    """

    def __init__(self, reason: str, node: Node | None = None) -> None:
        super().__init__(reason)
        self.reason, self.node = reason, node


class MutationError(NotPureError):
    """The graph does something to memory that has no functional form with the same value and gradient."""


class CheckpointedError(MutationError):
    """A checkpointed region does what is right only where Python runs the checkpoint itself."""


class NumberError(NotPureError):
    """A number is taken from the values of a tensor, which a shorter graph would be given."""


class BranchError(NotPureError):
    """Python asks the values of a tensor what to do, and what it does cannot be done whatever they are."""


class HookError(NotPureError):
    """The graph registers a hook on the gradient of a value."""
