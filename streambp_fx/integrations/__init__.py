"""Trainers of other libraries. Hugging Face's `Trainer`, and with it those of TRL, by a callback."""

from .callback import StreamBPCallback

__all__ = ["StreamBPCallback"]
