"""Standard streams that are closed, full or without a reader, and an agent's error file that cannot be written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from entrypoint.core.console import STDERR, STDOUT, redirected, report_error, write_all
from entrypoint.core.errors import UserError
from tests.conftest import clean_environment

ENTRYPOINT = f"{sys.executable} -m entrypoint"
FULL = "entrypoint: error: standard output: cannot be written (No space left on device). Write it to another place.\n"


def shell(folder: Path, command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**clean_environment(), "HOME": str(folder), **environ},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=60,
        check=False,
    )


# A command, its exit code, a part of its standard output and all of its standard error (None: the plan).
STREAMS: dict[str, tuple[str, int, str, str | None]] = {
    "no input": ("plan <&-", 0, "would run", ""),
    "no output": ("plan >&-", 0, "", ""),
    "no error": ("plan 2>&-", 0, "would run", ""),
    "no stream": ("plan <&- >&- 2>&-", 0, "", ""),
    "no error for an error": ("plan --nope 2>&-", 2, "", ""),
    "nothing for an error": ("plan --nope <&- >&- 2>&-", 2, "", ""),
    "full disk": ("plan >/dev/full", 3, "", FULL),
    "full disk for help": ("--help >/dev/full", 3, "", FULL),
    "full disk for JSON": ("plan --json >/dev/full", 3, "", FULL),
    "full disk for an error": ("plan --nope 2>/dev/full", 2, "", ""),
    "full disk for a launch": ("run x.py 2>/dev/full", 0, "ran 0 1 2", ""),
    "no reader": ("plan | true; exit ${PIPESTATUS[0]}", 0, "", ""),
    "output only to read": ("plan 1</dev/null", 3, "", FULL.replace("No space left on device", "Bad file descriptor")),
    "no input for a rank": ("run x.py <&-", 0, "ran 0 1 2", None),
    "no output for a rank": ("run x.py >&-", 0, "", None),
    "no error for a rank": ("run x.py 2>&-", 0, "ran 0 1 2", ""),
    "no stream for a rank": ("run x.py <&- >&- 2>&-; cat ran", 0, "ran 0 1 2", ""),
}
# Prints which standard streams a rank has.
SCRIPT = """
import os
line = " ".join(["ran", *(str(one) for one in range(3) if os.path.exists(f"/proc/self/fd/{one}"))])
print(line)
open("ran", "w").write(line)
"""


@pytest.mark.launch
@pytest.mark.parametrize("name", STREAMS)
def test_streams_change_no_exit_code(tmp_path: Path, name: str) -> None:
    command, code, out, err = STREAMS[name]
    (tmp_path / "x.py").write_text(SCRIPT)
    done = shell(tmp_path, f"{ENTRYPOINT} {command}")
    assert done.returncode == code, done.stderr
    assert out in done.stdout
    if err is not None:
        assert done.stderr == err
    assert "Traceback" not in done.stderr


@pytest.mark.launch
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_any_encoding_prints_a_plan(tmp_path: Path, encoding: str) -> None:
    done = shell(tmp_path, f"{ENTRYPOINT} plan --help-all", PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stderr) == (0, "")
    plan = shell(tmp_path, f"{ENTRYPOINT} plan run -m é$'\\xff'", PYTHONIOENCODING=encoding)
    assert (plan.returncode, plan.stderr) == (0, "")
    assert "would run" in plan.stdout


@pytest.mark.parametrize("kind", ["folder", "fifo", "missing/file", "x" * 300, "file"])
def test_error_file_that_cannot_be_written_is_not_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    path = tmp_path / kind
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    assert report_error(UserError("LAUNCH_X=1: wrong.")) == 2
    if kind == "file":
        assert json.loads(path.read_text())["message"]["message"] == "LAUNCH_X=1: wrong."
        assert capsys.readouterr().err == ""
    else:
        assert capsys.readouterr().err == "entrypoint: error: LAUNCH_X=1: wrong.\n"


def test_output_that_became_nonblocking_is_written_whole() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    received: list[bytes] = []

    def read_slowly() -> None:
        while part := os.read(reader, 65536):
            received.append(part)
            time.sleep(0.001)

    thread = threading.Thread(target=read_slowly)
    thread.start()
    write_all(writer, b"x" * 1_000_000)
    os.close(writer)
    thread.join()
    assert len(b"".join(received)) == 1_000_000


@pytest.mark.parametrize("number", [STDOUT, STDERR])
def test_redirected_restores_descriptor_after_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], number: int
) -> None:
    place = tmp_path / "said"
    with place.open("wb") as to, pytest.raises(OSError, match="Bad file descriptor"), redirected(number, to.fileno()):
        os.write(os.write(number, b"away") - 5, b"")  # writes, then fails
    os.write(number, b"here")
    assert place.read_bytes() == b"away"
    assert capfd.readouterr()[number - 1] == "here"
