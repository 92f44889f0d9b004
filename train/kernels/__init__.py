"""The compiled kernels: their sources, and how they are found."""
