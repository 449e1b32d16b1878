"""Measuring a training step: its peak memory, its time, its gradients, its live tensors."""
