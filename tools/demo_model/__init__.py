"""Trains and measures the model that is embedded in the engine: PYTHONPATH=tools python -m
demo_model.train."""
