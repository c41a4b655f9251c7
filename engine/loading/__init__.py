"""Reads checkpoints into models."""
