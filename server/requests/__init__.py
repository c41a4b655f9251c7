"""A request on its way: the objects that routes share, its body, its answer and its record."""
