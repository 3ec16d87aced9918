"""The training loop, its optimizers, its losses and planning."""
