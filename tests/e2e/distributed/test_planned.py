"""The collectives that a plan names are those that two processes call, by kind, count and bytes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from distributed_planned import planned, run
from distributed_planned_zero import run_zero
from in_processes import in_processes

# The model, the engine, and whether it is streamed: with FSDP2 the collectives are those of the unstreamed
# model (`test_sharded`); DDP's buckets are in the order in which gradients come.
OFTEN = [("dense", engine, engine == "ddp") for engine in ("fsdp2", "root", "kept", "ddp")]
SELDOM = [(m, e, True) for e in ("fsdp2", "root", "kept", "ddp") for m in ("dense", "tied", "lora")]


def check(cases: list[tuple[str, str, bool]], folder: Path) -> None:
    for own in in_processes(folder, 2, run, cases):
        for (model, engine, streamed), found in zip(cases, own, strict=True):
            expected, what = planned(model, engine), f"{model} {engine}"
            assert Counter(found["called"]) == Counter(expected), what
            for kind in ("gather", "scatter", "reduce"):  # an engine may begin the next gather before a sum
                pair = ([size for own, size in calls if own == kind] for calls in (found["called"], expected))
                assert next(pair) == next(pair), what
            if streamed and engine != "ddp":  # DDP is around the model, which does not know of it
                assert found["said"] == expected, what


@pytest.mark.slow
def test_often(tmp_path: Path) -> None:
    check(OFTEN, tmp_path)


def test_numbers_of_a_small_model() -> None:
    """Three layers: each is gathered twice and its gradients are summed once, the rest is gathered once."""
    for engine, counts in {
        "fsdp2": {"gather": 7, "scatter": 4},
        "root": {"gather": 1, "scatter": 1},
        "kept": {"gather": 4, "scatter": 4},
    }.items():
        assert Counter(kind for kind, _ in planned("dense", engine)) == counts


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, len(SELDOM), 3))
def test_seldom(first: int, tmp_path: Path) -> None:
    if any(model == "lora" for model, _, _ in SELDOM[first : first + 3]):
        pytest.importorskip("peft")
    check(SELDOM[first : first + 3], tmp_path)


@pytest.mark.slow
def test_replicas(tmp_path: Path) -> None:
    """Of four devices two have the same pieces: what is scattered among two is summed over the others."""
    for ((found,),) in zip(in_processes(tmp_path, 4, run, [("tied", "replicated", True)]), strict=True):
        assert Counter(found["called"]) == Counter(found["said"])
        assert Counter(kind for kind, _ in found["said"]) == {"gather": 7, "scatter": 4, "reduce": 4}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero(stage: int, tmp_path: Path) -> None:
    """Buckets are larger than the model; at the end the weights that were changed are gathered."""
    pytest.importorskip("deepspeed")
    for found in in_processes(tmp_path, 2, run_zero, stage):
        assert found == planned("dense", f"zero{stage}", torch.float32)
