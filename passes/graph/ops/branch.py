"""Branches of the model's Python code that ask the values of a tensor, as ops of a graph.

NOTE [branches on data]: `if mask.any(): y = y + f(x)` asks a tensor, and no graph has it: it is captured with
its body, which is always run, between two ops. `predicate` is what was asked, and `branch` says what is to be
of a value: that of the body where it holds, else the one before. Where it `rebinds` a variable, the value is
another tensor than before, or the same one, which nothing behind may depend on. A gradient goes to the one
that was taken; parameters that only the body reads then have none, as in eager, if it was not.
`s2_prove.branches` replaces branches whose body changes nothing where the predicate does not hold; others are
not streamed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

_LIBRARY = torch.library.Library("streambp_fx", "FRAGMENT")
_LIBRARY.define("predicate(Tensor asked) -> Tensor")
_LIBRARY.define("predicate_of_size(SymInt asked) -> Tensor")
_LIBRARY.define("branch(Tensor predicate, Tensor taken, Tensor skipped, bool rebinds) -> Tensor")
PREDICATE = torch.ops.streambp_fx.predicate
PREDICATE_OF_SIZE = torch.ops.streambp_fx.predicate_of_size
BRANCH = torch.ops.streambp_fx.branch
_PREDICATES = {PREDICATE, PREDICATE.default, PREDICATE_OF_SIZE, PREDICATE_OF_SIZE.default}


def is_own_copy(node: Node) -> bool:
    """True for the copy, in a Dynamo graph, that a body changes in the place of a tensor."""
    copies = node.op == "call_method" and node.target == "clone"
    return copies and node.kwargs == {"memory_format": torch.preserve_format}


def asked_by(branch: Node) -> Node:
    """The predicate of a branch: its body stands behind it."""
    (node,) = branch.args[0].all_input_nodes  # type: ignore[union-attr]
    return node if node.target in _PREDICATES else branch.args[0]  # type: ignore[return-value]


def _predicate(asked: Tensor) -> Tensor:
    return (asked.detach() != 0).reshape(())


def _predicate_of_size(asked: int) -> Tensor:
    return torch.full((), asked != 0, dtype=torch.bool, device="cpu")


def _fake_predicate(asked: Any) -> Tensor:
    device = asked.device if isinstance(asked, Tensor) else "cpu"
    return torch.empty((), dtype=torch.bool, device=device)


def _branch(predicate: Tensor, taken: Tensor, skipped: Tensor, rebinds: bool) -> Tensor:
    return (taken if predicate else skipped).clone()


def _fake_branch(predicate: Tensor, taken: Tensor, skipped: Tensor, rebinds: bool) -> Tensor:
    return torch.empty_like(taken)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0])


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    (predicate,) = ctx.saved_tensors
    return (None, gradient, None, None) if predicate else (None, None, gradient, None)


_LIBRARY.impl("predicate", _predicate, "CompositeExplicitAutograd")
_LIBRARY.impl("predicate_of_size", _predicate_of_size, "CompositeExplicitAutograd")
_LIBRARY.impl("branch", _branch, "CompositeExplicitAutograd")
torch.library.register_fake("streambp_fx::predicate", _fake_predicate, lib=_LIBRARY)
torch.library.register_fake("streambp_fx::predicate_of_size", _fake_predicate, lib=_LIBRARY)
torch.library.register_fake("streambp_fx::branch", _fake_branch, lib=_LIBRARY)
torch.library.register_autograd("streambp_fx::branch", _gradients, setup_context=_setup, lib=_LIBRARY)
