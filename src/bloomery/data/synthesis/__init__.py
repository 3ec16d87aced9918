"""Conversations written by another model: what is asked, whom, within which budget, and what is kept of it."""
