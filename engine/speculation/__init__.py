"""Proposes drafts and decides how many are made."""
