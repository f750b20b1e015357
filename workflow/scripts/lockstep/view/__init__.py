"""What people see while Snakemake works: in a terminal one live view, elsewhere a line for each finished run."""
