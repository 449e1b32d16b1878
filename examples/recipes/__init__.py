"""Training scripts to copy, each of one screen: `streambp-fx recipe NAME --model PATH --data FILE` runs them."""
