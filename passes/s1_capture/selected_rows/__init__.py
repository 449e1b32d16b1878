"""Rows that are selected by their values, worked on and put back, as one op of the graph."""
