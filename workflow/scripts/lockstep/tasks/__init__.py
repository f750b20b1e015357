"""What is trained: one file for each task; how examples become batches, the model, the loss, the scores, the test."""
