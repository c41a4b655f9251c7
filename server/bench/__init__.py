"""The benchmark of a running server, `headway bench serve`: an HTTP client that imports no other module of
Headway."""
