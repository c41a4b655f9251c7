"""Where drafts come from, and how many are made."""
