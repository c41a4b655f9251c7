"""PyTorch twins of `kernels/elementwise`."""
