"""The benchmark of a running server, `headway bench serve`: an HTTP client that imports nothing else of
ours."""
