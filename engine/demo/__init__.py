"""The embedded demo model: its files, and how they were made."""
