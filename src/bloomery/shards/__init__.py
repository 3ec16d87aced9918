"""Token files, packing, and the order in which samples come."""
