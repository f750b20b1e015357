"""Around the processes of a run, without PyTorch: starting, watching and ending them, and what they leave behind."""
