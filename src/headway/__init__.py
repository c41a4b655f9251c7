"""Headway: an OpenAI-compatible serving daemon built around multi-token-prediction speculation."""

__version__ = "0.1.0"
