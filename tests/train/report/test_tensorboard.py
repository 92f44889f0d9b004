"""TensorBoard on a folder of runs shows each run once."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.net import free_port


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
    finally:
        process.terminate()
        process.communicate(timeout=30)
