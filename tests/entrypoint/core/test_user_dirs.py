"""What stands in for a home, a name or a temporary folder that cannot be used."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from entrypoint.core.errors import ExitCode, UserError
from entrypoint.core.user_dirs import (
    UserDirs,
    compile_caches,
    create_private_dir,
    fallback_variables,
    read_user_dirs,
    why_not_writable,
)

PRIVATE = "/tmp/reference-training-7"
CASES = {
    "nothing to do": (UserDirs(uid=7), {"HOME": "/home/me"}, {}),
    "no home": (UserDirs("missing", uid=7), {}, {"HOME": PRIVATE}),
    "Docker's home of a user that it does not know": (
        UserDirs("missing", uid=7, named=False),
        {"HOME": "/"},
        {"HOME": PRIVATE, "USER": "7"},
    ),
    "a home to read only": (
        UserDirs("read-only", uid=7),
        {"HOME": "/home/me"},
        {
            "XDG_CACHE_HOME": f"{PRIVATE}/.cache",
            "MPLCONFIGDIR": f"{PRIVATE}/matplotlib",
            "TRITON_CACHE_DIR": f"{PRIVATE}/triton",
        },
    ),
    "a user's own stay": (
        UserDirs("read-only", uid=7),
        {"HOME": "/home/me", "XDG_CACHE_HOME": "/scratch", "MPLCONFIGDIR": "/scratch"},
        {"TRITON_CACHE_DIR": f"{PRIVATE}/triton"},
    ),
    "a read-only container": (
        UserDirs("missing", "/dev/shm", python_finds_it=False, uid=7),
        {},
        {"HOME": "/dev/shm/reference-training-7", "TMPDIR": "/dev/shm"},
    ),
    "nowhere at all": (UserDirs("missing", "", python_finds_it=False, uid=7), {}, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_fallback_variables_replace_only_unusable(name: str) -> None:
    places, environ, expected = CASES[name]
    instead = fallback_variables(places, environ)
    assert {name: value for name, (value, _) in instead.items()} == expected
    assert all(why for _, why in instead.values())


def test_read_user_dirs_of_this_process(tmp_path: Path) -> None:
    found = read_user_dirs({"HOME": str(tmp_path), "TMPDIR": str(tmp_path), "USER": "me"})
    assert found == UserDirs("usable", str(tmp_path), True, os.getuid(), True)
    assert read_user_dirs({"HOME": str(tmp_path / "gone"), "TMPDIR": str(tmp_path)}).home == "missing"
    assert read_user_dirs({"TMPDIR": str(tmp_path)}).home == "missing"


def test_create_private_dir_other_owner_raises(tmp_path: Path) -> None:
    mine = UserDirs("missing", str(tmp_path), uid=os.getuid())
    create_private_dir(mine)
    create_private_dir(mine)
    folder = tmp_path / f"reference-training-{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.rename(tmp_path / f"reference-training-{os.getuid() + 1}")
    with pytest.raises(UserError, match=f"belongs to user {os.getuid()}") as error:
        create_private_dir(UserDirs("missing", str(tmp_path), uid=os.getuid() + 1))
    assert error.value.code == ExitCode.MACHINE
    folder.symlink_to("/etc")
    with pytest.raises(UserError, match="belongs to"):
        create_private_dir(mine)


def test_why_not_writable_names_the_cause(tmp_path: Path) -> None:
    assert why_not_writable(tmp_path / "new/below") == ""
    (tmp_path / "file").write_text("")
    assert why_not_writable(tmp_path / "file/x") == "Not a directory"
    assert why_not_writable(tmp_path / "file") == "Not a directory"
    assert why_not_writable(tmp_path / ("x" * 300)) == "File name too long"
    assert why_not_writable(tmp_path / "new" / ("x" * 300)) == ""  # found out when the folder above is there
    (tmp_path / "loop").symlink_to("loop")
    assert why_not_writable(tmp_path / "loop/x") == "Too many levels of symbolic links"
    (tmp_path / "dangling").symlink_to("nowhere")
    assert why_not_writable(tmp_path / "dangling") == "No such file or directory"


def test_why_not_writable_in_a_removed_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert why_not_writable(Path("runs")) == "the working folder was removed"
    assert why_not_writable(tmp_path / "runs") == ""


@pytest.mark.parametrize("name", ["HOME", "TMPDIR"])
@pytest.mark.parametrize("folder", ["x" * 300, "/dev/null/x", "/proc/self/fd/999"])
def test_odd_home_is_a_missing_one(name: str, folder: str) -> None:
    found = read_user_dirs({name: folder})
    assert found.home == "missing"
    assert found.temporary != folder


def test_why_not_writable_read_only_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = SimpleNamespace(f_flag=os.ST_RDONLY)
    monkeypatch.setattr("entrypoint.core.user_dirs.os.statvfs", lambda _: flags)
    assert why_not_writable(tmp_path) == "Read-only file system"


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_why_not_writable_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert why_not_writable(tmp_path / "x") == "Permission denied"


def test_compile_caches_are_below_the_users_own(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), "TRITON_CACHE_DIR": "/scratch/mine"}
    folder = tmp_path / ".cache/reference-training/torchinductor"
    assert compile_caches(environ, make=True) == {"TORCHINDUCTOR_CACHE_DIR": (str(folder), "")}
    assert folder.stat().st_mode & 0o777 == 0o700
    assert compile_caches({}, make=True) == {}


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: os.chown(folder, 4001, 4001), "belongs to user 4001, and torch runs what it finds there"),
        (lambda folder: folder.chmod(0o777), "other users can write it, and torch runs what it finds there"),
    ],
)
@pytest.mark.parametrize("own", [True, False])
def test_compile_cache_of_others_is_refused(
    spoil: Callable[[Path], None], said: str, own: bool, tmp_path: Path
) -> None:
    if os.getuid():
        pytest.skip("needs root, to give a folder to another user")
    folder = tmp_path / ".cache/reference-training/torchinductor"
    folder.mkdir(parents=True)
    spoil(folder)
    environ = {"TORCHINDUCTOR_CACHE_DIR": str(folder)} if own else {"HOME": str(tmp_path)}
    with pytest.raises(UserError, match=f"^TORCHINDUCTOR_CACHE_DIR={folder}: {said}"):
        compile_caches(environ, make=True)
