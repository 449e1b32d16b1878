"""Stage 3: the graph is cut into segments, and what is kept between them is chosen.

In this order: widen_late, lazy_outputs, segment, signatures. When a step is planned, policy.
"""
