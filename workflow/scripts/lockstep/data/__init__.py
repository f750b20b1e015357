"""From files or the network to tokens on the disk, and the plan: which samples make up each optimizer step."""
