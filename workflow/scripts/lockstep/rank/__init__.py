"""Inside a process that trains: how a rank replays the plan, what is timed, and what is recorded."""
