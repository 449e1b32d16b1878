"""DeepSpeed's ZeRO, stage 3, in two processes: exact, each layer gathered once forward and once backward."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from distributed_zero3 import train_zero3
from in_processes import in_processes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "batch", "order"),
    [
        ("dense", "even", "after"),
        ("lora", "ragged", "before"),
        ("tied", "padded", "after"),
        ("unchunked attention", "even", "after"),
    ],
)
def test_zero3(model: str, batch: str, order: str, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    folders = [tmp_path / "streamed", tmp_path / "not"]
    for folder in folders:
        folder.mkdir()
    streamed = in_processes(folders[0], 2, train_zero3, model, batch, order)
    expected = in_processes(folders[1], 2, train_zero3, model, batch, None)
    for found, other in zip(streamed, expected, strict=True):
        assert found["chunked"] and found["chunked"].count(False) == (model == "unchunked attention")
        torch.testing.assert_close(found["losses"], other["losses"], rtol=1e-6, atol=0)
        for name, parameter in other["parameters"].items():
            torch.testing.assert_close(found["parameters"][name], parameter, rtol=1e-5, atol=1e-7)
        # embedding, three layers, norm, head (tied: none), in both directions
        assert found["gathers"] <= 12 and found["gathers"] < other["gathers"]
        assert found["most"] < 0.5 * found["all"]
        assert found["left"] == 0
