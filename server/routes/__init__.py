"""The endpoints; each file has a `router` that `app` includes."""
