"""The endpoints: wire format in and out; each file has a `router` that `app` includes."""
