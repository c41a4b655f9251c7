"""Logits processors and sampling."""
