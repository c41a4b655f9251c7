"""A request in progress: the objects that routes share, its body, its answer and its record."""
