"""Turns token events into choices: the parts of a text, its end, and its log-probabilities."""
