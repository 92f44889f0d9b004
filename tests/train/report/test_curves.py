"""The curves of a run, drawn without a library's messages."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.conftest import PYTHON

DRAW = """
import threading
class AtOnce(threading.Timer):
    def __init__(self, interval, function):
        super().__init__(0, function)
threading.Timer = AtOnce
from train.report.page import drawings, plots_of
lines = [
    {"kind": "step", "step": step, "epoch": step / 10, "loss": 1.0, "images_per_second": 5.0} for step in range(5)
]
assert "<svg" in "".join(drawings(plots_of(lines)))
"""


def test_drawing_prints_nothing(tmp_path: Path) -> None:
    """Matplotlib lists the fonts in a new home folder, and says so when that takes five seconds: here at once."""
    env = {**os.environ, "HOME": str(tmp_path), "MPLCONFIGDIR": str(tmp_path / "matplotlib")}
    done = subprocess.run([PYTHON, "-c", DRAW], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
