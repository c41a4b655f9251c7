"""PyTorch twins of `kernels/speculation`."""
