"""What is left open of a step, chosen for the memory that there is."""
