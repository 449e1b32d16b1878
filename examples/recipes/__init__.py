"""Training scripts of one screen, to copy; `streambp-fx recipe NAME --model PATH --data FILE` runs them."""
