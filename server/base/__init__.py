"""What every room of the API process may use, from its configuration to its errors."""
