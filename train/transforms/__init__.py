"""Augmentation and normalization of batches."""
