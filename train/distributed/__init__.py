"""Process group, gradients, statistics and failures across ranks."""
