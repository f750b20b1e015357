"""What five public articles say of training strategies, each claim with what measures it here: make claims."""

import benchmarks  # noqa: F401 - finds Lockstep beside these folders
