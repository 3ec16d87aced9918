"""Text to ids and back; conversations to ids and a loss mask."""
