"""Conversations from files of any shape, and what is left out of them, with reasons."""
