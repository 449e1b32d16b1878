"""The comparison of gradients that the script for GPUs begins with."""

from dataclasses import replace

import pytest
from rich.console import Console

from benchmarks import gpu_steps
from benchmarks.gpu import Found
from benchmarks.gpu_models import TINY
from benchmarks.gpu_steps import Job, exactness
from benchmarks.gpu_tables import gpu_tables
from benchmarks.modes import MODES, Setup
from streambp_fx.passes.s4_trace import attention_kernels

JOB = Job(config=TINY, mode="checkpointing", device="cpu", dtype="bfloat16", exact=33)


def _failing(monkeypatch, name):
    make = gpu_steps.make_step

    def made(model, job):
        def fails(ids):
            raise RuntimeError(f"no kernel for {job.mode}")

        return fails if job.mode == name else make(model, job)

    monkeypatch.setattr(gpu_steps, "make_step", made)


def test_a_mode_that_fails_leaves_the_others_their_figures(monkeypatch):
    _failing(monkeypatch, "checkpointing")
    found = exactness(JOB)
    assert found["eager float32"]["gradient_error"] == 0.0 < found["eager bfloat16"]["gradient_error"]
    for key in ("checkpointing float32", "checkpointing bfloat16"):
        assert found[key] == {"reason": "RuntimeError: no kernel for checkpointing"}
    console = Console(width=150, record=True, quiet=False)
    console.print(gpu_tables([replace(Found("exactness"), exact=found)], "1GiB")[0])
    assert console.export_text().count("no kernel for checkpointing") == 2


def test_without_eager_there_is_nothing_to_compare_with(monkeypatch):
    _failing(monkeypatch, "eager")
    with pytest.raises(RuntimeError, match="no kernel for eager"):
        exactness(JOB)


def test_where_the_mode_of_flash_runs():
    mode = MODES["streamed-flash"]
    assert mode.unavailable(Setup("cpu"), "qwen3") == "needs CUDA"
    assert mode.unavailable(Setup("cuda"), "qwen3") is None
    assert mode.ours and mode.chunked and mode.loss_chunk is None


@pytest.mark.slow
def test_the_mode_of_flash_switches_cudnn_off(monkeypatch):
    """While it runs, and not longer; on a CPU neither is there, and the step is that of the streamed mode."""
    import torch

    seen = []

    class Seen(attention_kernels.CpuFlash):
        def applies(self, *operands):
            seen.append((torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.cudnn_sdp_enabled()))
            return super().applies(*operands)

    monkeypatch.setattr(attention_kernels, "KERNELS", (Seen(),))
    losses = []
    for name in ("streamed", "streamed-flash"):
        job = replace(JOB, mode=name, chunk=16)
        model = gpu_steps.make_model(TINY, "cpu", torch.float32)
        ids = torch.arange(33).view(1, -1)
        losses.append(gpu_steps.make_step(model, job)(ids))
        assert set(seen) == {(True, name == "streamed")}
        seen.clear()
    assert losses[0] == losses[1] and torch.backends.cuda.cudnn_sdp_enabled()
