"""HTTP without the model: authorisation, limits on size and time, and streamed answers."""
