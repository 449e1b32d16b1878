"""Settings of the end-to-end tests. Their helpers are the e2e_*.py files beside this one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers.utils import logging

# Tiny tensors: a second thread costs more than it brings, ten times as much beside another worker.
torch.set_num_threads(1)
logging.set_verbosity_error()
logging.disable_progress_bar()

# Some tests take models and batches of others.
sys.path += [str(Path(__file__).parent / room) for room in ("inputs", "losses", "models")]


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A group of one process, in that of the test. FSDP2 gathers nothing then, and is otherwise the same."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
