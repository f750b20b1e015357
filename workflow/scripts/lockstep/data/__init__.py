"""Read data from files or the network, store it for training, and plan which samples make up each optimizer step."""
