"""Structured output: compiled grammars, and the tokens that they allow at each position of a window. Imports
no torch."""
