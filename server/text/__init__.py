"""Text to token ids and back: tokenizers, prompts, chat templates, and text that stays text."""
