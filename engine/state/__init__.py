"""Holds what lives on the device between steps: the row table, the KV cache pool, and how much memory they
may use."""
