"""What runs a compiled graph in forward and backward: the executor, and what it is made of."""
