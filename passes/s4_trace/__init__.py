"""Stage 4: a segment becomes programs over one chunk of its rows, forward and backward, as FX graphs.

In this order: chunk_program (by chunk_ops, prefix_attention, attention_kernels), vjp.
"""
