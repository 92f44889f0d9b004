"""What the launcher and the trainer share; knows nothing of training."""
