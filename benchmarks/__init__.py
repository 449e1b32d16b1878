"""Peers side by side: peak memory and time of one training step, each mode in its own process.

    python -m benchmarks --help

It is no part of the installed package and is run from a checkout.
"""
