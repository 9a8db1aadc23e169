"""Other people's checkpoints: through torch's own interface, and converted."""
