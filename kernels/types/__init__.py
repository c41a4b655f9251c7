"""Value types that kernels take and return."""
