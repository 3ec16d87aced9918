"""What the doctor asks of torch, each in a process of its own: a broken stack crashes or hangs at its first kernel."""
