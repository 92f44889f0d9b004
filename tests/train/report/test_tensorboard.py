"""TensorBoard on a folder of runs shows each run once."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.net import free_port
from train.report.tensorboard import walk_without_links

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def page_in_browser(address: str) -> str:
    """Return the page as a browser has drawn it, empty without one."""
    if not CHROMIUM:
        return ""
    words = (
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=20000",
        "--dump-dom",
        address,
    )
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False).stdout


def test_walk_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "one/tensorboard").mkdir(parents=True)
    (tmp_path / "one/tensorboard/events").write_text("")
    (tmp_path / "latest").symlink_to("one")
    walked = {folder: list(files) for folder, files in walk_without_links(str(tmp_path))}
    assert walked == {
        str(tmp_path): [],
        str(tmp_path / "one"): [],
        str(tmp_path / "one/tensorboard"): [str(tmp_path / "one/tensorboard/events")],
    }


@pytest.mark.launch
def test_tensorboard_shows_latest_once(tmp_path: Path) -> None:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    for name in ("one", "two"):
        writer = EventFileWriter(str(tmp_path / name / "tensorboard"))
        writer.add_event(Event(step=1, summary=Summary(value=[Summary.Value(tag="loss", simple_value=1.0)])))
        writer.close()
    (tmp_path / "latest").symlink_to("two")
    port = free_port()
    command = (sys.executable, "-m", "train.report.tensorboard", str(tmp_path), f"--port={port}")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        limit, runs = time.monotonic() + 60, None
        while runs != ["one/tensorboard", "two/tensorboard"]:
            assert time.monotonic() < limit, runs
            assert process.poll() is None, process.communicate()
            time.sleep(0.3)
            try:
                with urlopen(f"http://127.0.0.1:{port}/data/runs", timeout=5) as answer:
                    runs = sorted(json.load(answer))
            except OSError:
                continue
            assert not [run for run in runs if run.startswith("latest")]
        shown = page_in_browser(f"http://127.0.0.1:{port}/")
        assert "latest/tensorboard" not in shown
        assert "<title>TensorBoard" in shown or not CHROMIUM
    finally:
        process.terminate()
        process.communicate(timeout=30)
