"""Inside a process that trains: the plan as this rank replays it, what is timed, and what is noted."""
