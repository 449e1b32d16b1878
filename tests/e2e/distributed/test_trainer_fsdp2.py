"""Trainers in two processes with FSDP2, through accelerate: the logs and collectives of an unstreamed run."""

from __future__ import annotations

from pathlib import Path

import pytest
from distributed_trainer import train_with_trainer
from in_processes import in_processes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "model"),
    [("trainer", m) for m in ("dense", "tied", "lora", "bf16")] + [("sft", "dense"), ("dpo", "lora")],
)
def test_logs_are_the_same(kind: str, model: str, tmp_path: Path) -> None:
    folders = [tmp_path / "streamed", tmp_path / "not"]
    for folder in folders:
        folder.mkdir()
    streamed, *_ = in_processes(folders[0], 2, train_with_trainer, kind, model, True)
    expected, *_ = in_processes(folders[1], 2, train_with_trainer, kind, model, False)
    assert streamed["chunked"] and all(streamed["chunked"]) and not streamed["warned"], streamed["warned"]
    if kind == "dpo":  # TRL's loss asks the head's weight for itself (`full_tensor`), which is not counted
        expected["collectives"]["gather"] += 3
    assert streamed["collectives"] == expected["collectives"] and streamed["collectives"]["gather"]
    for found, other in zip(streamed["logs"], expected["logs"], strict=True):
        assert found == pytest.approx(other, rel=2e-2 if model == "bf16" else 1e-4)
