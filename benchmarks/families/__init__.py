"""Every causal language model of transformers at a tiny size: is it exact, streamed, and how small."""
