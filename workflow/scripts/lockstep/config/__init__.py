"""The configuration: its sections, its rows, the runs that follow from them, and this machine's hardware."""
