"""How a model is trained: one file per strategy, which holds only what differs from `single`."""
