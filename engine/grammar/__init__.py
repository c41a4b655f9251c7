"""Structured output: compiled grammars, and the tokens that they allow at each place of a window. Imports no
torch."""
