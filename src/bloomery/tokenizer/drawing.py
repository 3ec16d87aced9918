"""How an answer is drawn where nobody says how: in chat, over HTTP, in evaluation, and from what is exported."""

TEMPERATURE = 0.7
"""A small model of natural text that takes the likeliest token each time often repeats itself, and does not end."""
