"""What crosses the border between the API process and the engine process, and what both know. Imports no torch."""
