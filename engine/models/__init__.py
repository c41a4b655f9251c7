"""The model families. A family is one file and one line in registry.py."""
