"""What finished runs tell: whether they are still those of their row, and how many more of them are needed."""
