"""Triton and device access that all kernels share."""
