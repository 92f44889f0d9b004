"""Versions of installed packages."""

from __future__ import annotations

import numpy as np

from entrypoint.core.packages import package_version


def test_version_is_the_packages_own_or_empty() -> None:
    assert package_version("numpy") == np.__version__
    assert package_version("no-such-package") == ""
