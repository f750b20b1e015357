"""What is asked for: sections, rows, the runs that follow from them; and what this machine has for it."""
