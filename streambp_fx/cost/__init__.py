"""The cost model of a training step: what is held when, and how much is computed."""
