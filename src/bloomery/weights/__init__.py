"""Checkpoints of a run, and weights that other programs read."""
