"""The step of a segment as data.

instructions   what a step is made of: buffers, loops over chunks, calls of chunk programs
way            in which way the chunk programs of a segment are run
procedure      the instructions of a part of a segment's step
build          the instructions of a segment's forward, backward and loss
buffer_states  what the checker knows of the rows of each buffer
signature      what the programs of a segment read and make, and so its procedures
checker        proves of such a procedure that nothing is read before it is written, and so on
faults         what a checker finds wrong
run_checks     its part for the calls of programs
row_chunks     into which chunks the rows of a sequence are cut
saving         what is saved of each chunk: for which price, in which share of the rows
text           a procedure for people to read
"""
