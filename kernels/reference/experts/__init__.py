"""PyTorch twins of `kernels/experts`."""
