"""Loops along the sequence, captured as one op that takes a state from row to row."""
