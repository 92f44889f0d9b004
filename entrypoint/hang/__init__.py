"""What ranks that run are doing: the stacks of their threads, and who is missing from a collective."""
