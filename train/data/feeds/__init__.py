"""From images to the batches of a rank."""
