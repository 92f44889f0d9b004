"""Who started this process, and which rank it is."""
