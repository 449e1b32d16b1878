"""In the process of a step: the step of a model in the way that a mode names."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from streambp_fx.measure.step import MODES, StepSpec
from streambp_fx.measure.worker import TrainingStep, build_step
from streambp_fx.versions.differences import checkpoint_layers


@dataclass(frozen=True)
class PeerSpec(StepSpec):
    """A training step in the way of one of the peers.

    Attributes:
        path: of the reference's folder.
    """

    modes: ClassVar[tuple[str, ...]] = (
        *MODES,
        "chunked-loss",
        "fused-loss",
        "liger",
        "compile",
        "streamed-flash",
        "reference",
        "published",
    )

    path: str | None = None


def build(model: nn.Module, spec: StepSpec) -> TrainingStep:
    """The training step of `model` as `spec` says: forward and backward on ids, returning the loss."""
    maker = BUILDERS.get(spec.mode)
    return build_step(model, spec) if maker is None else maker(model, spec)


#: Ops whose results selective checkpointing keeps, by what it is asked to keep: names in `torch.ops.aten`.
ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
KEPT = {"attention": ATTENTION, "products": (*ATTENTION, "mm", "addmm", "bmm")}


def enable_checkpointing(model: Any, options: Mapping[str, Any]) -> None:
    """Checkpoint every layer.

    Args:
        model: of transformers.
        options: with `offload`, what is kept lies in pinned host memory meanwhile; with `keep`, one of
            `KEPT`, what these ops give is kept.
    """
    more: dict[str, Any] = {"offload": True} if options.get("offload") else {}
    if "keep" not in options:
        checkpoint_layers(model, **more)
        return
    kept = [getattr(torch.ops.aten, name).default for name in KEPT[options["keep"]]]
    checkpoint_layers(model, partial(create_selective_checkpoint_contexts, kept), **more)


def _whole(call: Any) -> TrainingStep:
    """A step from a function of ids that returns the loss as a tensor."""

    def step(tokens: torch.Tensor) -> float:
        loss = call(tokens)
        loss.backward()
        return loss.item()

    return step


def _checkpointing(model: Any, spec: StepSpec) -> TrainingStep:
    model.train()
    enable_checkpointing(model, spec.options)
    return _whole(lambda ids: model(input_ids=ids, labels=ids, use_cache=False).loss)


def _loss_rows(spec: StepSpec) -> int:
    assert spec.loss_chunk is not None, "only ours is chosen"
    return spec.loss_chunk


def _chunked_loss(model: Any, spec: StepSpec) -> TrainingStep:
    """Checkpointing; the head and the loss by chunks of rows, none of whose logits is kept."""
    model.train()
    enable_checkpointing(model, spec.options)
    head, rows = model.get_output_embeddings(), _loss_rows(spec)

    def part(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(head(hidden).float(), labels, reduction="sum")

    def loss(ids: torch.Tensor) -> torch.Tensor:
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
        labels = ids[:, 1:].flatten()
        chunks = zip(hidden.split(rows), labels.split(rows), strict=True)
        parts = [checkpoint(part, some, words, use_reentrant=False) for some, words in chunks]
        return torch.stack(parts).sum() / labels.numel()  # type: ignore[arg-type]

    return _whole(loss)


def _fused_loss(model: Any, spec: StepSpec) -> TrainingStep:
    """Checkpointing; TRL's head, which computes logits by tiles and keeps none.

    NOTE [tiles on the CPU]: without Triton its tiles of 4096 rows become several temporaries as large, more
    than the logits of a short sequence. It has no argument for their size.
    """
    import trl.kernels.chunked_logprob
    from trl.trainer.utils import add_fused_lm_head

    if spec.device == "cpu":
        trl.kernels.chunked_logprob.TOKEN_CHUNK_SIZE = _loss_rows(spec)
    model.train()
    enable_checkpointing(model, spec.options)
    add_fused_lm_head(model)
    return _whole(lambda ids: model(input_ids=ids, labels=ids, fused_lm_head=True).loss)


def _liger(model: Any, spec: StepSpec) -> TrainingStep:
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=model)
    return _checkpointing(model, spec)


def _compile(model: Any, spec: StepSpec) -> TrainingStep:
    """Inductor on forward and backward. Logits are no output of the graph, so they need not be kept."""
    import torch._functorch.config

    model.train()
    torch._functorch.config.activation_memory_budget = spec.options["budget"]

    def loss(ids: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, labels=ids, use_cache=False).loss

    return _whole(torch.compile(loss, dynamic=False))


def _reference(model: nn.Module, spec: StepSpec) -> TrainingStep:
    assert isinstance(spec, PeerSpec) and spec.path is not None
    module = _load(Path(spec.path) / "streamed_qwen3.py")
    model.train()
    save = bool(spec.options.get("save_attention"))
    return module.Streamed(model, spec.chunk, _loss_rows(spec), save).step


def _load(path: Path) -> Any:
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[path.stem] = module
    found.loader.exec_module(module)
    return module


def _streamed_flash(model: Any, spec: StepSpec) -> TrainingStep:
    """Streamed, with cuDNN switched off while programs are made: attention is PyTorch's flash attention."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    streamed = build_step(model, replace(spec, mode="streamed"))
    allowed = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

    def step(tokens: torch.Tensor) -> float:
        with sdpa_kernel(allowed):
            return streamed(tokens)

    return step


BUILDERS = {
    "checkpointing": _checkpointing,
    "chunked-loss": _chunked_loss,
    "fused-loss": _fused_loss,
    "liger": _liger,
    "compile": _compile,
    "streamed-flash": _streamed_flash,
    "reference": _reference,
}
