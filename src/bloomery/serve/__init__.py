"""Models behind HTTP, and the page to talk to them."""
