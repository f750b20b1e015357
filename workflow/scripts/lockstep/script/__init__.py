"""Record a user's unchanged training script, replay it as one process, and compare the two."""
