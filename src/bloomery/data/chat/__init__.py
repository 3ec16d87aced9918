"""Chat data: conversations and preferences from files of any shape, and what is filtered out of them."""
