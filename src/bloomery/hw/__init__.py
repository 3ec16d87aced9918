"""The machine: which torch it needs, what it can do. The one place that names a vendor."""
