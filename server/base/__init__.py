"""Modules that every package of the API process may use, from its configuration to its errors."""
