"""Settings of the subset that is run with many versions; helpers are in tests/e2e and tests/integrations."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from transformers.utils import logging

os.environ["HF_HUB_OFFLINE"] = "1"
torch.set_num_threads(1)
logging.set_verbosity_error()
logging.disable_progress_bar()

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS / "e2e"), str(TESTS / "integrations")]
