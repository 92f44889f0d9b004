"""What stands in for a home, a name or a temporary folder that cannot be used."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from entrypoint.core import user_dirs
from entrypoint.core.errors import ExitCode
from entrypoint.core.user_dirs import (
    compile_caches,
    create_private_dir,
    fallback_variables,
    temporary_folder,
    why_not_writable,
)
from tests.conftest import refusal

PRIVATE = "/tmp/reference-training-7"
# By name: what this user may write to, the environment, and what stands in.
CASES = {
    "nothing to do": ({"/home/me", "/tmp"}, {"HOME": "/home/me", "USER": "me"}, {}),
    "no home": ({"/tmp"}, {"USER": "me"}, {"HOME": PRIVATE}),
    "Docker's home of a user that it does not know": ({"/tmp"}, {"HOME": "/"}, {"HOME": PRIVATE, "USER": "7"}),
    "a home to read only": (
        {"/tmp"},
        {"HOME": "/home/me", "USER": "me"},
        {"XDG_CACHE_HOME": f"{PRIVATE}/.cache", "MPLCONFIGDIR": f"{PRIVATE}/matplotlib"},
    ),
    "caches to read only": (
        {"/tmp", "/home/me", "not /home/me/.cache"},
        {"HOME": "/home/me", "USER": "me"},
        {"XDG_CACHE_HOME": f"{PRIVATE}/.cache"},
    ),
    "the user's own caches to read only": (
        {"/tmp", "/home/me"},
        {"HOME": "/home/me", "USER": "me", "XDG_CACHE_HOME": "/proc/x"},
        {"XDG_CACHE_HOME": f"{PRIVATE}/.cache"},
    ),
    "a user's own stay": (
        {"/tmp", "/scratch"},
        {"HOME": "/home/me", "USER": "me", "XDG_CACHE_HOME": "/scratch"},
        {"MPLCONFIGDIR": f"{PRIVATE}/matplotlib"},
    ),
    "a folder of the user's for temporary files": (
        {"/tmp", "/scratch"},
        {"USER": "me", "TEMP": "/scratch"},
        {"HOME": "/scratch/reference-training-7"},
    ),
    "a read-only container": (
        {"/dev/shm"},
        {"LOGNAME": "me"},
        {"HOME": "/dev/shm/reference-training-7", "TMPDIR": "/dev/shm"},
    ),
    "nowhere at all": (set[str](), {"USER": "me"}, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_fallback_variables_replace_only_unusable(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    writable, environ, expected = CASES[name]
    monkeypatch.setattr(user_dirs, "is_writable", writable.__contains__)

    def why_not(folder: Path) -> str:
        is_below = f"not {folder}" not in writable and any(
            str(place) in writable for place in (folder, *folder.parents)
        )
        return "" if is_below else "Permission denied"

    monkeypatch.setattr(user_dirs, "why_not_writable", why_not)
    monkeypatch.setattr(user_dirs, "is_folder", {"/", "/home/me"}.__contains__)
    monkeypatch.setattr(user_dirs, "user_name", lambda _: "")
    monkeypatch.setattr(os, "getuid", lambda: 7)
    instead = fallback_variables(environ)
    assert {name: value for name, (value, _) in instead.items()} == expected
    assert all(why for _, why in instead.values())


def test_folders_of_this_process(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), "TMPDIR": str(tmp_path), "USER": "me"}
    assert temporary_folder(environ) == str(tmp_path)
    assert fallback_variables(environ) == {}
    home = str(tmp_path / f"reference-training-{os.getuid()}")
    for gone in ({"HOME": str(tmp_path / "gone")}, {"HOME": ""}):
        assert fallback_variables({**environ, **gone})["HOME"][0] == home


def test_create_private_dir_other_owner_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "private"
    create_private_dir(folder)
    create_private_dir(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    owner = os.getuid()
    with monkeypatch.context() as other:
        other.setattr(os, "getuid", lambda: owner + 1)
        refusal(create_private_dir, folder, match=f"belongs to user {owner}", code=ExitCode.MACHINE)
    (tmp_path / "link").symlink_to("/etc")
    refusal(create_private_dir, tmp_path / "link", match="belongs to", code=ExitCode.MACHINE)


@pytest.mark.parametrize(
    ("path", "cause"),
    [
        ("new/below", ""),
        ("file/x", "Not a directory"),
        ("file", "Not a directory"),
        ("x" * 300, "File name too long"),
        ("new/" + "x" * 300, ""),  # found out when the folder above is there
        ("loop/x", "Too many levels of symbolic links"),
        ("dangling", "No such file or directory"),
    ],
)
def test_why_not_writable_names_the_cause(tmp_path: Path, path: str, cause: str) -> None:
    (tmp_path / "file").write_text("")
    for link, target in (("loop", "loop"), ("dangling", "nowhere")):
        (tmp_path / link).symlink_to(target)
    assert why_not_writable(tmp_path / path) == cause


@pytest.mark.usefixtures("removed_folder")
def test_why_not_writable_in_a_removed_folder(tmp_path: Path) -> None:
    assert why_not_writable(Path("runs")) == "the working folder was removed"
    assert why_not_writable(tmp_path / "runs") == ""


@pytest.mark.parametrize("name", ["HOME", "TMPDIR"])
@pytest.mark.parametrize("folder", ["x" * 300, "/dev/null/x", "/proc/self/fd/999"])
def test_odd_home_is_a_missing_one(name: str, folder: str) -> None:
    assert temporary_folder({name: folder}) != folder
    assert "HOME" in fallback_variables({name: folder})


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
        (lambda folder: os.chown(folder, 4001, 4001), "it belongs to user 4001, and torch runs what it finds there"),
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
    refusal(compile_caches, environ, make=True, match=f"^TORCHINDUCTOR_CACHE_DIR={folder}: {said}")
