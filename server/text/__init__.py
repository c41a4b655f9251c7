"""Converts text to token ids and back: tokenizers, prompts, chat templates, and clients' text that stays
text."""
