"""Text to token IDs and back; conversations to token IDs and a loss mask."""
