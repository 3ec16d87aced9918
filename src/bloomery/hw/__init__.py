"""The machine: which torch it needs, what it can do. Only this package names vendors."""
