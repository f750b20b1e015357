"""The tasks, one file each: how examples become batches, the model, the loss, the scores, and the test."""
