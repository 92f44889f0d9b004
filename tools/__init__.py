"""Checks and pages of this repository; not part of the packages."""
