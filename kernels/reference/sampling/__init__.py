"""PyTorch twins of `kernels/sampling`."""
