"""TRL's loss head as plain PyTorch, so that a step of its trainers is one graph from ids to loss.

TRL puts a forward over the model's that computes log-probabilities with a kernel of its own, in tiles of 4096
tokens times 32768 words. A tile is far more than a chunk of logits, and how many there are depends on the
number of tokens, so the kernel cannot be captured for all lengths. What it computes can be said in a few
operations, of which the compiler then makes a streamed loss head like any other.
"""

from __future__ import annotations

import torch
from torch import Tensor

ALL = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def statistics_of_tokens(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    chunk_size: int,
    final_logit_softcapping: float | None = None,
    logit_scale: float = 1.0,
    outputs: tuple[str, ...] = ALL,
) -> tuple[Tensor | None, ...]:
    """What `trl.kernels.ChunkedLogProbFunction.apply` of TRL 1.16 returns, with the same arguments.

    Args:
        hidden: (N, hidden size), rows of the head's input.
        weight, bias: (V, hidden size) and (V) of the head.
        targets: (N) words, integers.
        temperature: the logits are divided by it.
        chunk_size: of the tiles; not used.
        final_logit_softcapping, logit_scale: of the model's config.
        outputs: which of `ALL` are wanted.

    Returns:
        Five values of shape (N): log-probability of the target, entropy, log of the sum of the squared
        probabilities, mean logit, and whether the target is the most likely word. Float32 but for the last,
        which is boolean; None for what is not wanted. The last three have no gradient.
    """
    logits = torch.nn.functional.linear(hidden, weight, bias).float() * logit_scale
    if final_logit_softcapping is not None:
        logits = final_logit_softcapping * torch.tanh(logits / final_logit_softcapping)
    logits = logits / temperature
    logs = torch.log_softmax(logits, -1)
    chosen = logs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    found: dict[str, Tensor] = {}
    if "entropy" in outputs:
        found["entropy"] = -(logs.exp() * logs).sum(-1)
    if "log_sum_sq_probs" in outputs:
        found["log_sum_sq_probs"] = torch.logsumexp(2 * logs.detach(), -1)
    if "mean_logits" in outputs:
        found["mean_logits"] = logits.detach().mean(-1)
    if "is_top1" in outputs:
        found["is_top1"] = logits.detach().argmax(-1) == targets
    return chosen, *(found.get(name) for name in ALL)


class PlainKernel:
    """Stands for the class of the kernel, whose `apply` is called."""

    apply = staticmethod(statistics_of_tokens)


def never(device: torch.device) -> bool:
    """In place of the question whether Triton is used: TRL then scores all tokens and not those with a label,
    whose number would be a size that depends on the data."""
    return False


#: Module and name of what is replaced, and by what.
PLAIN_FORMS = {
    ("trl.kernels.chunked_logprob", "ChunkedLogProbFunction"): PlainKernel,
    ("trl.kernels.chunked_logprob", "_use_triton"): never,
}
