"""Attention masks: what can be proved about them from one element, and their blocks."""
