"""How one segment runs: its chunks in order, as a loss head, or whole."""
