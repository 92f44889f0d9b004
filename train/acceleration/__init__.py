"""What computes a step faster: precision, memory format, kernels."""
