"""The last step before the program, in each rank."""
