"""One module a command: its `run` takes the command line and returns the exit code."""
