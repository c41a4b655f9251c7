"""The messages between the API process and the engine process, and the types that both use. Imports no
torch."""
