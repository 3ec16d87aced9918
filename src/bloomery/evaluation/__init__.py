"""Scores of a model, and the report that shows them."""
