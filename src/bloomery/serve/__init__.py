"""The HTTP server and the chat page."""
