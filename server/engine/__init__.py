"""The engine process as the API process sees it: its life cycle, requests in, token events out."""
