"""Generation: token IDs in, token IDs out."""
