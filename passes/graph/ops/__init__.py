"""Ops of this project that stand in captured graphs: branches on data, recurrences, causal convolutions."""
