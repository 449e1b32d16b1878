"""The commands of `streambp-fx`, one a file."""
