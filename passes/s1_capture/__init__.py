"""Stage 1: what Dynamo hands over becomes one ATen graph, without changes in place, in normal form.

In this order: sequence_length, capture, autocast, normalize.
"""
