"""How a chunk draws random numbers: from a seed that it gets, so that it can draw the same again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import Node

from ..graph.facts import Role, sum_dtype, tensors_of
from ..graph.op_arguments import arguments
from ..rules.random_numbers import DRAWS, PROBABILITIES, how_drawn
from .evaluation import Evaluation, emit
from .prefix_attention import seeded_generator


@torch.library.custom_op("streambp_fx::random_numbers", mutates_args=())
def random_numbers(
    size: Sequence[int], method: str, parameters: Sequence[float], seed: int, dtype: torch.dtype,
    device: torch.device,
) -> Tensor:  # fmt: skip
    """Numbers of a shape and dtype, drawn by a method of a tensor from a generator with this seed."""
    generator = seeded_generator(device, seed)
    given = [int(p) if method == "random_" else p for p in parameters]
    made = torch.empty(list(size), dtype=dtype, device=device)
    return getattr(made, method)(*given, generator=generator)


@random_numbers.register_fake
def _(
    size: Sequence[int], method: str, parameters: Sequence[float], seed: int, dtype: torch.dtype,
    device: torch.device,
) -> Tensor:  # fmt: skip
    return torch.empty(list(size), dtype=dtype, device=device)


@emit(*DRAWS)
def drawn(run: Evaluation, node: Node, role: Role) -> Tensor:
    """Drawn for the rows of the chunk."""
    call = arguments(node)
    method, parameters = how_drawn(node.target, call)
    lender, dtype = run.operand(call["self"], role), tensors_of(node)[0].dtype
    given = [float(p) for p in parameters]
    return random_numbers(list(lender.shape), method, given, run.seed_of(node), dtype, lender.device)


@emit(*PROBABILITIES)
def zeros_and_ones(run: Evaluation, node: Node, role: Role) -> Tensor:
    """1 where a number is less than the probability. Half precision has too few numbers between 0 and 1."""
    probable = run.operand(arguments(node)[PROBABILITIES[node.target]], role).detach()
    size, seed = list(probable.shape), run.seed_of(node)
    number = random_numbers(size, "uniform_", [0.0, 1.0], seed, sum_dtype(probable.dtype), probable.device)
    return (number < probable).to(tensors_of(node)[0].dtype)
