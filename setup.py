"""Builds the wheel: one import name, `reference_training`, with the project's packages in a folder below it."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

OWN = "reference_training._own"
PACKAGES = find_packages(include=["entrypoint*", "train*"])


class BuildWithPth(build_py):
    """Puts the `.pth` file next to the packages."""

    def run(self) -> None:
        """Build the packages, and copy the file."""
        super().run()
        shutil.copy("reference_training/reference_training.pth", Path(self.build_lib) / "reference_training.pth")


setup(
    packages=["reference_training", *(f"{OWN}.{name}" for name in PACKAGES)],
    package_dir={f"{OWN}.{name}": name.replace(".", "/") for name in PACKAGES},
    package_data={
        "reference_training": ["py.typed"],
        f"{OWN}.entrypoint": ["py.typed"],
        f"{OWN}.train": [
            "py.typed",
            "data/digits.csv.gz",
            "data/digits_license.txt",
            "report/*.jinja",
            "report/page.css",
            "recipes/*.toml",
        ],
        f"{OWN}.train.kernels": ["*.cpp", "kernels.sh"],
    },
    scripts=["reference_training/entrypoint"],
    cmdclass={"build_py": BuildWithPth},
)
