"""Models by name, and functions that change or inspect them."""
