"""Bloomery turns raw text into a language model that answers, on the machine its owner has."""

__version__ = "0.1.0"
