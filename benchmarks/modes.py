"""The ways of taking a training step that are compared, and what each of them needs.

Every peer has its best sensible settings; `Mode.settings` says them, in tables and in the results.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .errors import BenchmarkError

#: Rows of a chunk of the loss head, for every peer that has one; ours is left to choose.
LOSS_CHUNK = 256


@dataclass(frozen=True)
class Setup:
    """What this run has to offer to modes.

    Attributes:
        device: "cpu" or "cuda".
        reference: a folder with streamed_qwen3.py, the hand-written step; None: not given.
        published: a checkout of the published StreamBP; None: not given.
        published_python: the Python of an environment with its dependencies.
    """

    device: str = "cpu"
    reference: Path | None = None
    published: Path | None = None
    published_python: Path | None = None


#: Says why a mode cannot run on a model of a type ("qwen3"), or None.
Need = Callable[[Setup, str], "str | None"]


def _cuda(setup: Setup, model_type: str) -> str | None:
    return None if setup.device == "cuda" else "needs CUDA"


def _package(name: str, pip: str = "") -> Need:
    def need(setup: Setup, model_type: str) -> str | None:
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed (pip install {pip or name})"
        return None

    return need


def _reference(setup: Setup, model_type: str) -> str | None:
    if setup.reference is None:
        return "not given (--reference PATH)"
    return None if model_type == "qwen3" else "is written for Qwen3 alone"


def _published(setup: Setup, model_type: str) -> str | None:
    if setup.published is None:
        return "not given (--published PATH)"
    return None if model_type in ("qwen3", "qwen2", "llama") else "its model class takes Qwen and Llama only"


@dataclass(frozen=True)
class Mode:
    """One way of taking a training step.

    Attributes:
        name: on the command line and in results.
        label: for people.
        step: how the worker builds the step, one of `build.STEPS`.
        settings: what it is run with, for people.
        options: for the worker: of `transform`, or of the peer.
        needs: each says why the mode cannot run here, or None.
    """

    name: str
    label: str
    step: str
    settings: str
    options: dict[str, Any] = field(default_factory=dict)
    needs: tuple[Need, ...] = ()

    @property
    def chunked(self) -> bool:
        """Its figures depend on the chunk of a layer."""
        return self.ours or self.step in ("reference", "published")

    @property
    def ours(self) -> bool:
        """It is streambp-fx."""
        return self.step.startswith("streamed")

    @property
    def loss_chunk(self) -> int | None:
        """Rows of a chunk of the loss head; None: left to `transform`."""
        return None if self.ours else LOSS_CHUNK

    def unavailable(self, setup: Setup, model_type: str) -> str | None:
        """Why the mode cannot run here; None if it can."""
        return next((why for need in self.needs if (why := need(setup, model_type))), None)


CHECKPOINT = "every layer, use_reentrant=False"
TRL = "trl.trainer.utils.add_fused_lm_head"
_FILLED = {"policy": "auto"}
_ALL = (
    Mode("eager", "eager, nothing recomputed", "eager", "sdpa attention"),
    Mode("checkpointing", "Hugging Face checkpointing", "checkpointing", CHECKPOINT),
    Mode(
        "checkpointing-chunked-loss",
        "checkpointing, loss by chunks",
        "chunked-loss",
        f"{CHECKPOINT}; head and loss of {LOSS_CHUNK} rows at a time, each under torch.utils.checkpoint",
    ),
    Mode(
        "checkpointing-fused-loss",
        "checkpointing, TRL's fused head",
        "fused-loss",
        f"{CHECKPOINT}; {TRL}, its defaults; on a CPU its tiles cut to {LOSS_CHUNK} rows",
        needs=(_package("trl"),),
    ),
    Mode(
        "checkpointing-offload",
        "checkpointing, offload=True",
        "checkpointing",
        f"{CHECKPOINT}, offload=True",
        {"offload": True},
        (_cuda,),
    ),
    Mode(
        "checkpointing-offload-chunked-loss",
        "checkpointing, offload=True, loss by chunks",
        "chunked-loss",
        f"{CHECKPOINT}, offload=True; head and loss of {LOSS_CHUNK} rows at a time",
        {"offload": True},
        (_cuda,),
    ),
    Mode(
        "checkpointing-offload-fused-loss",
        "checkpointing, offload=True, TRL's fused head",
        "fused-loss",
        f"{CHECKPOINT}, offload=True; {TRL}",
        {"offload": True},
        (_cuda, _package("trl")),
    ),
    *(
        Mode(
            f"selective-{kept}",
            f"selective checkpointing, {words} kept",
            "chunked-loss",
            f"every layer by torch.utils.checkpoint, a policy of PyTorch's keeps what {words} give; head and "
            f"loss of {LOSS_CHUNK} rows at a time",
            {"keep": kept},
        )
        for kept, words in (("attention", "attention"), ("products", "products and attention"))
    ),
    Mode(
        "liger",
        "checkpointing, Liger kernels",
        "liger",
        f"{CHECKPOINT}; all kernels of Liger for the model, its fused linear cross-entropy included",
        needs=(_cuda, _package("liger_kernel", "liger-kernel")),
    ),
    Mode(
        "compile-0.5",
        "torch.compile, half of the activations",
        "compile",
        "Inductor, one graph that returns the loss alone, activation_memory_budget=0.5",
        {"budget": 0.5},
    ),
    Mode(
        "compile-0.1",
        "torch.compile, a tenth of the activations",
        "compile",
        "Inductor, one graph that returns the loss alone, activation_memory_budget=0.1",
        {"budget": 0.1},
    ),
    Mode(
        "published",
        "published StreamBP",
        "published",
        "its own logits_chunk_size=100, checkpoint_chunk_size as ours, in its own environment",
        needs=(_published,),
    ),
    Mode("reference", "hand-written", "reference", "the schedule written by hand", {}, (_reference,)),
    Mode(
        "reference-attention",
        "hand-written, attention saved",
        "reference",
        "the schedule written by hand, attention outputs saved",
        {"save_attention": True},
        (_reference,),
    ),
    Mode("streamed", "streamed", "streamed", "inputs kept"),
    Mode("streamed-attention", 'streamed, save="attention"', "streamed", "", {"save": "attention"}),
    *(
        Mode(f"streamed-{n}", f'streamed, memory="{n}MiB"', "streamed", "", _FILLED | {"memory": f"{n}MiB"})
        for n in (300, 400, 600, 1000, 1200, 8192, 16384)
    ),
    Mode("streamed-every-2", "streamed, every=2", "streamed", "", {"every": 2}),
    Mode("streamed-disk", 'streamed, offload="disk"', "streamed", "", {"offload": "disk"}),
    Mode(
        "streamed-disk-rows",
        'streamed, offload="disk", rows by chunks',
        "streamed",
        "",
        {"offload": "disk", "offload_rows": True},
    ),
    Mode("streamed-host", 'streamed, offload="host"', "streamed", "", {"offload": "host"}, (_cuda,)),
    Mode(
        "streamed-flash",
        "streamed, attention by flash",
        "streamed-flash",
        "inputs kept; cuDNN's attention switched off",
        {},
        (_cuda,),
    ),
    Mode("streamed-inductor", 'streamed, body="inductor"', "streamed", "", {"body": "inductor"}),
)
MODES = {mode.name: mode for mode in _ALL}
#: What all others are compared with.
PEER = "checkpointing"


def modes_named(names: str) -> list[Mode]:
    """Modes from a comma-separated list, or "all".

    Raises:
        BenchmarkError: there is no mode of that name.
    """
    if names == "all":
        return list(MODES.values())
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in MODES:
            raise BenchmarkError(f"there is no mode {name!r}; modes: {', '.join(MODES)}")
    if not wanted:
        raise BenchmarkError(f"no mode is named; modes: {', '.join(MODES)}")
    return [MODES[name] for name in wanted]


def environment() -> dict[str, Any]:
    """Versions and the machine, for the results."""
    import platform

    import transformers

    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "system": platform.system(),
        "processor": _processor(),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["gpu_bytes"] = torch.cuda.get_device_properties(0).total_memory
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    return next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), "unknown")
