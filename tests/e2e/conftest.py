"""Settings of the end-to-end tests. Their helpers are the e2e_*.py files beside this one."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers.utils import logging

# Tiny tensors: a second thread costs more than it brings, ten times as much beside another worker.
torch.set_num_threads(1)
logging.set_verbosity_error()
logging.disable_progress_bar()

# Some tests take models and batches of others.
sys.path += [str(Path(__file__).parent / room) for room in ("inputs", "losses", "models")]
