"""Translates Anthropic's Messages API to chats."""
