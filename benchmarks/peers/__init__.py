"""Other tools that train the same model, each as a program of its own; `make bench-peers` starts them."""
