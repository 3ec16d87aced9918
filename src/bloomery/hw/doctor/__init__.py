"""What is wrong with a machine, and a command that fixes it, in layers: files, torch, results of torch."""
