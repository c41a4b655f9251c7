"""Several processes that compute one model together: its ranks."""
