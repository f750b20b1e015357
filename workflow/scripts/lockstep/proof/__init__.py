"""Prove that a row trains the same model as `single`, and check that its runs were fair."""
