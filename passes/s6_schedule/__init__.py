"""The training step as data.

step_parts      what it is made of: chunk programs of segments, and what runs in ordinary PyTorch
program         its instructions, and the values that they read and make
build           the step as its segments come
transforms      from step to step: memory policy, rows left out, when values are dropped, loops over layers
kept_states     states of recurrences that are kept from the forward to the backward
chunks_first    each chunk goes through neighbouring layers before the next chunk does
rows_elsewhere  rows between layers lie elsewhere and come to the device by chunks
offloading      what the backward reads leaves the device in between
own_rows        each device runs its own rows of the sequence
sharding        parameters that are stored in pieces: taken before they are read, and given back
as_eager        the step as PyTorch runs it, to be counted
collectives     which collectives a step calls, and with how many bytes
checker         proves of a step that each value goes where it belongs
checking        what it proves of each kind of instruction
text            a step for people to read, and as JSON
repeats         repetitions in a list
"""
