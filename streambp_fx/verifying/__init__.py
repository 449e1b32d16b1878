"""What `streambp_fx.verify` is made of: its result, and a model that is left as it was."""
