"""What clients demand of the form of a text, as grammars that the engine enforces."""
