"""What a training run needs, which ways there are to do it, and which of them is taken."""
