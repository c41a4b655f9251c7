"""PyTorch twins of `kernels/transfer`."""
