"""Stage 5: the programs of a segment, made faster and smaller, and turned into Python.

In this order, by lower: simplify, reorder, rematerialize, write_in_place, workspace, lower.
"""
