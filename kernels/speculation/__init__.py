"""Bookkeeping of a decode round: drafts, verification, rewind."""
