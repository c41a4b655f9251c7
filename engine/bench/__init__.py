"""The offline benchmark, run as `headway bench engine`. Its shapes are models without weights."""
