"""Settings of the tests with trainers. Their helpers are in trainer_runs.py beside this one."""

from __future__ import annotations

import torch
from transformers.utils import logging

torch.set_num_threads(1)
logging.set_verbosity_error()
logging.disable_progress_bar()
