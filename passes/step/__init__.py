"""The step of a segment as data.

instructions   what a step is made of: buffers, loops over chunks, calls of chunk programs
build          the instructions of a segment's forward, backward and loss
signature      what the programs of a segment read and make, and so its procedures
checker        proves of such a procedure that nothing is read before it is written, and so on
run_checks     its part for the calls of programs
text           a procedure for people to read
"""
