"""What a run prints and writes."""
