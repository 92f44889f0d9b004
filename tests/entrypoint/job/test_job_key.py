"""The key of a job: from the environment, from a file of the user's, or written by rank 0."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest

from entrypoint.core.errors import ExitCode
from entrypoint.job.job_key import KeySource, find_key_source, key_reader, read_drawn_key, write_key
from tests.conftest import refusal

SECRET = "0123456789abcdef"


def nfs_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str = "nfs4") -> dict[str, str]:
    root = tmp_path / "root"
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/mounts").write_text(f"overlay / overlay rw 0 0\nserver:/home {tmp_path}/home {kind} rw 0 0\n")
    monkeypatch.setattr("entrypoint.job.job_key.ROOT", root)
    return {"HOME": f"{tmp_path}/home"}


@pytest.mark.parametrize(
    ("environ", "secret_file", "identity", "kind"),
    [
        ({}, "key", "7.0", "file"),
        ({"ENTRYPOINT_JOB_KEY": SECRET}, "key", "7.0", "file"),
        ({"ENTRYPOINT_JOB_KEY": SECRET}, "", "7.0", "variable"),
        ({}, "", "7.0", "drawn"),
        ({}, "", "program x.py (1)", "none"),
        ({"MASTER_ADDR": "node1"}, "", "program x.py (1)", "drawn"),
        ({}, "", "", "none"),
        ({}, "", "none", "none"),
        ({"HOME": ""}, "", "7.0", "none"),
    ],
)
def test_first_source_of_a_key_is_taken(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    environ: dict[str, str],
    secret_file: str,
    identity: str,
    kind: str,
) -> None:
    assert find_key_source(nfs_home(tmp_path, monkeypatch) | environ, secret_file, identity).kind == kind


@pytest.mark.parametrize(
    ("kind", "drawn"), [("nfs", True), ("lustre", True), ("gpfs", True), ("ext4", False), ("tmpfs", False)]
)
def test_key_is_drawn_where_nodes_share_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, drawn: bool
) -> None:
    source = find_key_source(nfs_home(tmp_path, monkeypatch, kind), "", "7.0")
    assert (source.kind == "drawn") is drawn
    assert source == find_key_source(nfs_home(tmp_path / "other", monkeypatch, "ext4"), "", "7.0") or drawn


def test_drawn_key_reaches_the_other_ranks_alone(tmp_path: Path) -> None:
    source = KeySource("drawn", str(tmp_path / "cache/keys/7"))
    others = key_reader(source, {}, draws=False)
    assert others() == b"", "rank 0 has not started"
    rank0 = key_reader(source, {}, draws=True)
    assert others() == rank0() != b""
    assert stat.S_IMODE(Path(source.path).stat().st_mode) == 0o600
    assert stat.S_IMODE(Path(source.path).parent.stat().st_mode) == 0o700
    again = key_reader(source, {}, draws=True)
    assert others() == again() != rank0(), "a job that was requeued"


def test_key_that_others_may_have_written_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "keys/7"
    write_key(path)
    path.chmod(0o604)
    assert read_drawn_key(path) == b""
    path.chmod(0o600)
    link = tmp_path / "link"
    link.symlink_to(path)
    assert read_drawn_key(link) == b""
    os.mkfifo(tmp_path / "fifo", 0o600)
    assert read_drawn_key(tmp_path / "fifo") == b""


def test_keys_of_old_jobs_are_removed(tmp_path: Path) -> None:
    old, recent = tmp_path / "keys/old", tmp_path / "keys/recent"
    write_key(old)
    write_key(recent)
    os.utime(old, (0, time.time() - 31 * 86400))
    write_key(tmp_path / "keys/7")
    assert {path.name for path in (tmp_path / "keys").iterdir()} == {"recent", "7"}


def test_place_that_takes_no_key_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "keys").write_text("a file")
    assert key_reader(KeySource("drawn", f"{tmp_path}/keys/7"), {}, draws=True)() == b""
    assert "keys/7: the job's key cannot be kept there. The job has none. Set LAUNCH" in capfd.readouterr().err


def test_own_file_is_read_and_the_variable_too(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(f"{SECRET}\n")
    path.chmod(0o600)
    assert key_reader(KeySource("file", str(path)), {}, draws=False)() == SECRET.encode()
    assert key_reader(KeySource("variable"), {"ENTRYPOINT_JOB_KEY": SECRET}, draws=True)() == SECRET.encode()
    assert key_reader(KeySource(), {}, draws=True)() == b""


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        (SECRET, 0o644, "other users may read or write it. Run: chmod 600"),
        (SECRET, 0o620, "other users may read or write it"),
        ("short", 0o600, "has less than 16 bytes. Make one: head -c 32 /dev/urandom"),
        ("", 0o600, "has less than 16 bytes"),
    ],
)
@pytest.mark.skipif(os.getuid() == 0, reason="a file of root's may be read by all; needs an ordinary user")
def test_file_that_is_no_secret_is_refused(tmp_path: Path, text: str, mode: int, said: str) -> None:
    path = tmp_path / "key"
    path.write_text(text)
    path.chmod(mode)
    refusal(key_reader, KeySource("file", str(path)), {}, draws=False, match=said)


@pytest.mark.parametrize(
    ("owner", "mode", "said", "code"),
    [
        (0, 0o666, "other users may read or write it", ExitCode.USAGE),
        (0, 0o644, "", ExitCode.DONE),
        (65534, 0o600, "belongs to another user", ExitCode.MACHINE),
    ],
)
@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to give a file to another user")
def test_file_of_another_user_is_refused(tmp_path: Path, owner: int, mode: int, said: str, code: ExitCode) -> None:
    path = tmp_path / "key"
    path.write_text(SECRET)
    os.chown(path, owner, -1)
    path.chmod(mode)
    if said:
        refusal(key_reader, KeySource("file", str(path)), {}, draws=False, match=said, code=code)
    else:
        assert key_reader(KeySource("file", str(path)), {}, draws=False)() == SECRET.encode()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nothing", "cannot be read (No such file or directory). Name a file that all nodes read."),
        (".", "cannot be read (Is a directory)"),
        ("\0", "cannot be read (no file name)"),
        ("x\x1b[2Jy", "cannot be read (No such file"),
    ],
)
def test_name_that_is_no_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str) -> None:
    monkeypatch.chdir(tmp_path)
    message = refusal(key_reader, KeySource("file", name), {}, draws=False)
    assert said in message
    assert "\x1b" not in message


def test_variable_that_is_too_short_is_refused_and_not_shown() -> None:
    assert "pssst" not in refusal(
        key_reader,
        KeySource("variable"),
        {"ENTRYPOINT_JOB_KEY": "pssst"},
        draws=True,
        match="ENTRYPOINT_JOB_KEY: has less than 16 bytes",
    )
