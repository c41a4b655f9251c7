"""PyTorch twins of `kernels/linear`."""
