"""Training on preferences: which of two answers is the better one, or whether an answer is right."""
