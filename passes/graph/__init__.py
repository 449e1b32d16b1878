"""The graph and what is known of it: facts, where values come from, what ops are, subgraphs."""
