"""A chat from its body to the answer, for every API that has chats."""
