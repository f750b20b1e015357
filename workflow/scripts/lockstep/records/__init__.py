"""Records: results packed into one file that can be shared, and checked by others (`lockstep record`, records/)."""
