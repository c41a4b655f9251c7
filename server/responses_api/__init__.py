"""OpenAI's Responses API in the words of a chat."""
