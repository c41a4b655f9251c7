"""The models: their specs, their families, and the reading of config.json."""
