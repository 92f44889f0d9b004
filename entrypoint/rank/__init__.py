"""Code that runs in each rank before its program."""
