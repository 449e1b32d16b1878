"""Dynamo: which sizes it is asked to keep open, what it says, the hooks that it looks after."""
