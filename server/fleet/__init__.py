"""A fleet on Ray Serve: several servers of one model behind one address."""
