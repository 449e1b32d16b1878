"""Rewrites of ops, see `normalize`: each keeps the value of what it rewrites."""
