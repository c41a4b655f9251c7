"""Anthropic's Messages API in the words of a chat."""
