"""The engine process as the API process sees it: its life, requests in, token events out."""
