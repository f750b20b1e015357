"""Whether a row trained the same model as `single`, and whether its runs were fair."""
