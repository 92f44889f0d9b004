"""One writer for a run's folder: who is alive keeps it, who is gone loses it."""

from __future__ import annotations

import errno
import os
import runpy
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

from entrypoint.core.errors import ExitCode, UserError
from tests.conftest import refusal
from tests.processes import killed_at_end
from train.lock_file import LOCK_NAME, RunLock

FAR = "filelock/2\npid=7\nhost=far\nmode=lease\ntoken=0123456789abcdef0123456789abcdef\nduration=20.0\nstart=1\n"


def test_older_filelock_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "filelock", types.ModuleType("filelock"))
    said = "^filelock: is missing or older than 4.3. Run: pip install"
    refusal(runpy.run_module, "train.lock_file", match=said, code=ExitCode.MACHINE)


@pytest.mark.launch
def test_run_lock_is_exclusive_until_released(tmp_path: Path) -> None:
    with RunLock() as one:
        one.acquire(tmp_path)
        assert one.is_held
        with (
            RunLock() as other,
            pytest.raises(UserError, match=rf"process {os.getpid()} on .* is training in this folder"),
        ):
            other.acquire(tmp_path)
        assert one.is_held
    assert not (tmp_path / LOCK_NAME).exists()
    with RunLock() as other:
        other.acquire(tmp_path)


def test_lock_of_a_dead_process_is_taken_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    child = os.fork()
    if not child:
        lock = RunLock()
        lock.acquire(tmp_path)
        os._exit(0)
    os.waitpid(child, 0)
    assert (tmp_path / LOCK_NAME).exists()
    with RunLock(stale_s=60) as lock:
        lock.acquire(tmp_path)
        assert lock.is_held
    assert not capsys.readouterr().err


def test_holder_whose_lock_was_taken_knows(tmp_path: Path) -> None:
    with RunLock() as lock:
        lock.acquire(tmp_path)
        (tmp_path / LOCK_NAME).unlink()
        (tmp_path / LOCK_NAME).write_text(FAR)
        assert not lock.is_held
    assert (tmp_path / LOCK_NAME).read_text() == FAR


@pytest.mark.launch
@pytest.mark.slow_except("far")
@pytest.mark.parametrize("content", ["", "{", "[" * 100_000, FAR, FAR.replace("far", "\x1b[2J"), FAR.replace("7", "x")])
def test_run_lock_stale_is_taken_with_a_notice(
    tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / LOCK_NAME).write_text(content)
    with RunLock(stale_s=0.5) as lock:
        lock.acquire(tmp_path)
        assert lock.is_held
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"entrypoint: {tmp_path} is locked by ")
    assert line.isprintable()


def test_sign_of_life_from_afar_keeps_the_lock(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).write_text(FAR)
    touch = "import os, sys, time\nwhile True: os.utime(sys.argv[1]); time.sleep(0.3)"
    with (
        killed_at_end([sys.executable, "-c", touch, str(tmp_path / LOCK_NAME)]),
        RunLock() as lock,
        pytest.raises(UserError, match="process 7 on far is training in this folder"),
    ):
        lock.acquire(tmp_path)
    assert (tmp_path / LOCK_NAME).read_text() == FAR


@pytest.mark.parametrize("kind", ["FIFO", "folder"])
def test_what_is_no_lock_file_is_taken_away(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / LOCK_NAME
    os.mkfifo(path) if kind == "FIFO" else path.mkdir()

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patch, RunLock() as lock:
        patch.setattr(Path, "rename", refuse)
        with pytest.raises(PermissionError):
            lock.acquire(tmp_path)
    with RunLock() as lock:
        lock.acquire(tmp_path)
        assert lock.is_held


NO_FLOCK = """
#include <errno.h>
#include <stdlib.h>
int flock(int file, int operation) { (void)file; (void)operation; errno = atoi(getenv("FLOCK_ERRNO")); return -1; }
"""
COUNT_UP = """
import sys, time
from pathlib import Path
from train.lock_file import folder_lock
folder = Path(sys.argv[1])
with folder_lock(folder / "building.lock", "another process"):
    count = folder / "count"
    before = int(count.read_text() or 0)
    time.sleep(0.2)
    count.write_text(str(before + 1))
"""


@pytest.fixture(scope="module")
def no_flock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a library that makes flock(2) fail as on Lustre and NFS without locks."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc to build a flock that fails")
    folder = tmp_path_factory.mktemp("flock")
    (folder / "f.c").write_text(NO_FLOCK)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", folder / "f.so", folder / "f.c"], check=True)
    return folder / "f.so"


@pytest.mark.launch
@pytest.mark.parametrize("number", [None, errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EIO])
def test_folder_lock_excludes_others_with_and_without_flock(
    tmp_path: Path, number: int | None, request: pytest.FixtureRequest
) -> None:
    (tmp_path / "count").write_text("")
    more = {}
    if number is not None:
        more = {"LD_PRELOAD": str(request.getfixturevalue("no_flock")), "FLOCK_ERRNO": str(number)}
    command = [sys.executable, "-c", COUNT_UP, str(tmp_path)]
    running = [subprocess.Popen(command, env={**os.environ, **more}) for _ in range(4)]
    assert [one.wait(60) for one in running] == [0] * 4
    assert (tmp_path / "count").read_text() == "4"
    assert not (tmp_path / "building.lock.held").exists()


@pytest.mark.launch
def test_folder_lock_of_a_killed_holder_is_taken(tmp_path: Path, no_flock: Path) -> None:
    (tmp_path / "count").write_text("")
    environ = {**os.environ, "LD_PRELOAD": str(no_flock), "FLOCK_ERRNO": str(errno.ENOLCK)}
    hold = COUNT_UP.replace("time.sleep(0.2)", "print('held', flush=True); time.sleep(60)")
    with killed_at_end(
        [sys.executable, "-c", hold, str(tmp_path)], env=environ, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        holder.kill()
    subprocess.run([sys.executable, "-c", COUNT_UP, str(tmp_path)], env=environ, check=True, timeout=60)
    assert (tmp_path / "count").read_text() == "1"
