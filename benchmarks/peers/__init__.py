"""What people train the same model with today, each a program of its own, started by `make bench-peers`."""
