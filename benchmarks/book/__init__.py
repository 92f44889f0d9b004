"""The book's experiments, run again here: its figures beside ours."""
