"""People's own training scripts: recorded as they stand, replayed as one process, and held against each other."""
