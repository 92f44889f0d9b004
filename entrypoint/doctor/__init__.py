"""Checks of machine, installation and running ranks."""
