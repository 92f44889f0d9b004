"""The book's experiments, run again here: its figures next to ours."""
