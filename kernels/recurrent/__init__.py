"""State of recurrent layers."""
