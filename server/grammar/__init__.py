"""Clients' demands on the form of a text, as grammars that the engine enforces."""
