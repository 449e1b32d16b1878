"""The self-check of a compiled graph before its first result is returned.

self_check           all of it
short_choices        which short steps are taken
short_inputs         inputs of a few rows, cut from those of the real step
short_steps          one short step, and how far two of them are from one another
rounding             what rounding alone makes of a short step
same_random_numbers  two runs that draw the same random numbers
drawn_factors        are the factors of dropout as they should be?
dropout              is the gradient that of the loss, with what dropout has drawn?
gradient_sketch      a gradient as a few random projections
try_claims           what the analysis claims of rows, tried by poisoning
first_wrong_op       the first segment and op that differ
checked_kinds        which kinds of steps have been checked
result               what was found
"""
