"""Ops of this project that stand in captured graphs.

They are branches on data, rows that are selected by their values, recurrences, and causal convolutions.
"""
