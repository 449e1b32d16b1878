"""What a step saves for its backward, chosen for the memory that there is."""
