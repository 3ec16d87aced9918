"""The network, on one device; its arithmetic."""
