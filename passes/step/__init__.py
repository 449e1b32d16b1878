"""The step of a segment as data.

instructions   what a step is made of: buffers, loops over chunks, calls of chunk programs
build          the instructions of a segment's forward, backward and loss
checker        proves of such a procedure that nothing is read before it is written, and so on
text           a procedure for people to read
"""
