"""Rules that drop documents for how they look, or mask private data in them, a batch at a time."""
