"""Versions of installed packages."""

from __future__ import annotations

# The name under which this project is installed.
PROJECT = "reference-training"


def package_version(name: str) -> str:
    """Return the version of an installed package, empty if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version  # `entrypoint run` of one node needs none

    try:
        return version(name)
    except PackageNotFoundError:
        return ""
