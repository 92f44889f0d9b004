"""What counts as the failure of a collective, and where it was called."""

from __future__ import annotations

import json
import os
from pathlib import Path
from traceback import FrameSummary as Frame

import pytest

from entrypoint.core.collective_error import (
    collective_of,
    frames_of,
    is_collective_error,
    note_collective_error,
    place_of,
)

TORCH = "/venv/lib/python3.11/site-packages/torch"
WRAPPED = [
    Frame(f"{TORCH}/distributed/distributed_c10d.py", 10, "all_gather"),
    Frame(f"{TORCH}/distributed/c10d_logger.py", 20, "wrapper"),
    Frame(f"{TORCH}/distributed/distributed_c10d.py", 30, "all_gather_object"),
    Frame("x.py", 12, "main"),
    Frame("x.py", 40, "<module>"),
]
BACKWARD = [Frame(f"{TORCH}/autograd/graph.py", 1, "_engine_run_backward"), Frame("x.py", 7, "<module>")]
TIMED_OUT = "[gloo/unbound_buffer.cc:78] Timed out waiting 6000ms for recv operation to complete"


class DistBackendError(RuntimeError):
    """Of the name of torch's own."""


@pytest.mark.parametrize(
    ("frames", "collective", "place"),
    [
        (WRAPPED, "all_gather_object", "x.py:12 in main"),
        (BACKWARD, "the backward pass", "x.py:7"),
        ([Frame(os.__file__, 3, "walk"), Frame("/home/u/y.py", 2, "load")], "", "/home/u/y.py:2 in load"),
        ([Frame(f"{TORCH}/nn.py", 3, "forward")], "", f"{TORCH}/nn.py:3 in forward"),
        ([], "", "an unknown place"),
    ],
)
def test_collective_and_place_of_stack(frames: list[Frame], collective: str, place: str) -> None:
    assert (collective_of(frames), place_of(frames)) == (collective, place)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError(TIMED_OUT), True),
        (DistBackendError("NCCL error"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError(TIMED_OUT), False),
    ],
)
def test_is_collective_error(error: Exception, expected: bool) -> None:
    assert is_collective_error(error) == expected


def test_noted_error_is_for_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    try:
        raise RuntimeError(TIMED_OUT)
    except RuntimeError as error:
        caught = error
    note_collective_error(ValueError("another"))
    note_collective_error(RuntimeError("mirror: Connection refused (timeout=10)"))  # a download
    assert not file.exists()
    note_collective_error(caught)
    extra = json.loads(file.read_text())["message"]["extraInfo"]
    (frame,) = frames_of(caught)
    place = f"{__file__}:{frame.lineno} in test_noted_error_is_for_launcher"
    assert extra["collective"] == {"called": "a collective", "place": place, "how": "timeout"}
    assert extra["lost_peer"]
    file.write_text("the program's own")
    note_collective_error(caught)
    assert file.read_text() == "the program's own"
