"""Kernels of our own for the CPU and, in Triton, for GPUs, each tried before it is trusted."""
