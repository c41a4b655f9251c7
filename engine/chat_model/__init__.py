"""A small model that chats: its package from the index, converted once into a folder that `headway serve`
takes."""
