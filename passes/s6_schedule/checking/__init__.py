"""What is proved of the instructions of a step, one function for each kind.

They rely on what is known of the graph, and not on what has made the step.

step_state   what is known between two instructions
operands     which values a call of a segment reads and makes, and in which way it is run
calls        procedures of segments
parts        what runs in ordinary PyTorch
groups       what is run again, what leaves the device and comes back, loops over layers
gradients    from what the caller gives to what the caller is given
several      what several devices share
"""
