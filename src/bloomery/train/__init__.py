"""The one loop, its optimizers, its loss, its plan."""
