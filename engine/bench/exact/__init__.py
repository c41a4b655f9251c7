"""`headway bench exact`: checks on the user's own model that nothing else in the engine changes a request's
text."""
