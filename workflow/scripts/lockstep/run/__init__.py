"""A run's processes from outside, without PyTorch: starting, watching and ending them, and collecting their results."""
