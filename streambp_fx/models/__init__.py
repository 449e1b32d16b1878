"""What models and their libraries bring along: arguments, adapters, forwards of others."""
