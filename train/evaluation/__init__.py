"""What a trained model is worth, and what it says of images."""
