"""PyTorch twins of `kernels/recurrent`."""
