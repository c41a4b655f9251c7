"""Translates OpenAI's Responses API to chats."""
