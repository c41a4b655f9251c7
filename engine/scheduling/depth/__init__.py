"""Chooses the number of drafts of each round from the measured cost of rounds and the observed acceptance of
drafts."""
