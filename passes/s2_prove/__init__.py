"""Stage 2: what is true of each value: where its rows are, which rows it reads, which gradients come to it.

In this order: axes, footprints. When the schedule is built, linear_loss; for batches, independent_samples.
"""
