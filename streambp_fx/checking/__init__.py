"""The self-check of a compiled graph before its first result is returned.

short        inputs of a few rows, cut from those of the real step
randomness   two runs that draw the same random numbers
runs         one short step: outputs, and gradients as sketches
sketch       a gradient as a few random projections
claims       what the analysis claims of rows, tried by poisoning
blame        the first segment and op that differ
self_check   all of it
result       what was found
"""
