"""PyTorch twins of `kernels/attention`."""
