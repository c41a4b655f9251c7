"""Token events to choices: the parts of a text, its end, and its log-probabilities."""
