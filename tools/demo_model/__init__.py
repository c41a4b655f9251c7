"""Trains and measures the model that is embedded in the engine; run it by PYTHONPATH=tools python -m
demo_model.train."""
