"""What people see while Snakemake works: a live view in a terminal, and elsewhere a line for each finished run."""
