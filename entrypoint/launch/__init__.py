"""Starts what the plan says."""
