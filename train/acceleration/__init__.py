"""Faster training steps: precision, memory format, kernels."""
