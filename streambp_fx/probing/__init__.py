"""The independence probe: what is claimed of rows, tried on the tensors of a step."""
