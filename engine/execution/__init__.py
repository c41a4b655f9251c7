"""Runs the scheduler's plans on the device: prompts, decode rounds, CUDA graphs, results."""
