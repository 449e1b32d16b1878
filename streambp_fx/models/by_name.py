"""Models without weights: by name, by a config, with adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import PlanError
from .sources import config_file

DTYPES = ("float32", "bfloat16", "float16", "float64")


def check_named(is_built: bool, dtype: Any, lora_rank: Any) -> None:
    """Check what is said of a model that is given by name.

    Args:
        is_built: it is given as a module instead.
        dtype: the name of one of `DTYPES`.
        lora_rank: of adapters, at least 1; None: there are none.

    Raises:
        PlanError: an argument is not allowed.
    """
    if dtype not in DTYPES:
        raise PlanError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    if lora_rank is None:
        return
    if is_built:
        raise PlanError("lora_rank is for a model that is given by name: give this one its adapters before")
    if isinstance(lora_rank, bool) or not isinstance(lora_rank, int) or lora_rank < 1:
        raise PlanError(f"lora_rank must be an int of at least 1, not {lora_rank!r}")


def model_on_meta(source: str | Path, dtype: str = "bfloat16", lora_rank: int | None = None) -> nn.Module:
    """A causal language model without weights: everything but the values of its tensors.

    Args:
        source: a name of `known_models` (an organisation before a slash is ignored), a directory with
            config.json, or a config file.
        dtype: of the weights, one of `DTYPES`.
        lora_rank: freeze the weights and put LoRA adapters of this rank on all linear layers (needs peft).

    Raises:
        PlanError: no such model, or no causal language model, a `dtype` or `lora_rank` that is not allowed,
            or peft is missing.
    """
    from .loading import ModelSourceError, model_from_config

    if not isinstance(source, str | Path):
        raise PlanError(
            f"the model must be an nn.Module, a name or a path, not a {type(source).__name__}. Of a config: "
            'with torch.device("meta"): model = AutoModelForCausalLM.from_config(config)'
        )
    check_named(False, dtype, lora_rank)
    try:
        with torch.device("meta"):
            model = model_from_config(config_file(str(source)), getattr(torch, dtype))
    except ModelSourceError as error:
        raise PlanError(str(error)) from error
    return model if lora_rank is None else _with_adapters(model, lora_rank)


def _with_adapters(model: nn.Module, rank: int) -> nn.Module:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise PlanError("LoRA needs the package peft: pip install peft") from error
    config = LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    with torch.device("meta"):
        return get_peft_model(model, config).train()  # type: ignore[arg-type]
