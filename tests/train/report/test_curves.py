"""The curves of a run, drawn without a library's messages."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from PIL import Image

from tests.conftest import PYTHON

DRAW = """
import json, pathlib, sys, threading
class AtOnce(threading.Timer):
    def __init__(self, interval, function):
        super().__init__(0, function)
threading.Timer = AtOnce
from train.report.curves import draw_curves
from train.report.page import plots
lines = [
    {"kind": "step", "step": step, "epoch": step / 10, "loss": 1.0, "images_per_second": 5.0} for step in range(5)
]
draw_curves(pathlib.Path(sys.argv[1]), lines)
assert "<svg" in plots(lines)
"""


def test_drawing_prints_nothing_for_any_name_of_a_run(tmp_path: Path) -> None:
    """Matplotlib lists the fonts in a new home folder, and says so when that takes five seconds: here at once."""
    name = r"日本 $\broken$"
    (tmp_path / name).mkdir()
    env = {**os.environ, "HOME": str(tmp_path), "MPLCONFIGDIR": str(tmp_path / "matplotlib")}
    done = subprocess.run(
        [PYTHON, "-c", DRAW, str(tmp_path / name)], env=env, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    with Image.open(tmp_path / name / "curves.png") as curves:
        assert curves.width > 1000
