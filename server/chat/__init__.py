"""A chat from its body to the answer, whichever API asked for it."""
