"""Turns logits into tokens."""
