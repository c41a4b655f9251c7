"""Observations of requests and of the engine: metrics, and the history that the live page draws."""
