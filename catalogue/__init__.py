"""The catalogue of proofs: which strategy and option trains the same model, by version and kind of model."""
