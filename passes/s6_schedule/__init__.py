"""The training step as data.

parts        what it is made of: chunk programs of segments, and what runs in ordinary PyTorch
program      its instructions, and the values that they read and make
build        the step as its segments come
transforms   from step to step: memory policy, offloading, rows left out, when values are dropped, loops
sharding     parameters that are stored in pieces: taken before they are read, and given back
checker      proves of a step that each value goes where it belongs
checking     what it proves of each kind of instruction
text         a step for people to read, and as JSON
repeats      repetitions in a list
"""
