"""What a streamed forward is made of: what runs a captured graph, and steps that are not streamed."""
