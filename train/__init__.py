"""The trainer: one program for CPU and CUDA, one process or many."""
