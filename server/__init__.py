"""The API process: HTTP and text on one side, token ids for the engine process on the other. It never
imports torch."""
