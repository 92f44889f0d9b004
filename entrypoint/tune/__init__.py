"""Finds the fastest plan by trials."""
