"""`make bench-depth`: the depth that is chosen against every fixed one, over a grid of loads and
acceptance profiles."""
