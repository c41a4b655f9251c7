"""Decides which requests run in each step. Imports no torch: the scheduler is tested in milliseconds."""
