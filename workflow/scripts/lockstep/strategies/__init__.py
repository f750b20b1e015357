"""How a model is trained: one file for each strategy, in which stands what differs from `single`."""
