"""The index of shards is kept, checked when it is read, and made again when a shard or the index was changed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec
import pytest

from entrypoint.core.atomic_files import checksum_trailer
from entrypoint.core.errors import UserError
from tests.train.data.shard_files import samples, write_tar
from train.data.sources import shard_index
from train.data.sources.image_file import CHANGED_SHARD, TarMember, read_file
from train.data.sources.shard_index import SavedIndex, load_index
from train.data.sources.tar_headers import read_shard


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    """Return two shards of three and two images."""
    return [
        write_tar(tmp_path / "data/a.tar", samples([0, 1, 2])),
        write_tar(tmp_path / "data/b.tar", samples([2, 1], first=3)),
    ]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the list of the shards whose headers are read from now on."""
    seen: list[Path] = []

    def count(path: Path) -> object:
        seen.append(path)
        return read_shard(path)

    monkeypatch.setattr(shard_index, "read_shard", count)
    return seen


def load(shards: list[Path], cache: Path | None) -> list[tuple[str, bytes | None, int]]:
    files, labels = load_index(shards[0].parent, shards, cache)
    return [(files.relative(row), read_file(files[row]), label) for row, label in enumerate(labels)]


def index_file(cache: Path) -> Path:
    (path,) = cache.glob("images-*/*.shards")
    return path


def test_headers_are_read_once(shards: list[Path], read: list[Path], tmp_path: Path) -> None:
    first = load(shards, tmp_path / "cache")
    assert sorted(read) == shards
    assert [(name, label) for name, _, label in first] == [
        ("a.tar:000000.jpg", 0), ("a.tar:000001.jpg", 1), ("a.tar:000002.jpg", 2), ("b.tar:000003.jpg", 2),
        ("b.tar:000004.jpg", 1),
    ]  # fmt: skip
    assert load(shards, tmp_path / "cache") == first
    assert len(read) == 2


def test_unchanged_size_and_time_of_a_swap_is_noticed(shards: list[Path], tmp_path: Path) -> None:
    before, status = load(shards, tmp_path / "cache"), shards[0].stat()
    write_tar(shards[0], samples([2, 1, 0]))
    os.utime(shards[0], ns=(status.st_atime_ns, status.st_mtime_ns))
    after = load(shards, tmp_path / "cache")
    assert [label for *_, label in after] == [2, 1, 0, 2, 1] != [label for *_, label in before]


def test_shard_changed_during_the_run_is_not_read(shards: list[Path], tmp_path: Path) -> None:
    files, _ = load_index(tmp_path / "data", shards, tmp_path / "cache")
    member = files[0]
    assert isinstance(member, TarMember)
    time.sleep(0.01)
    write_tar(shards[0], samples([2, 1, 0]))
    with pytest.raises(OSError, match=CHANGED_SHARD):
        read_file(member)
    write_tar(shards[0], samples([2]))
    with pytest.raises(OSError, match=CHANGED_SHARD):
        read_file(member)


def sealed(content: bytes) -> bytes:
    return content + checksum_trailer(content)


def rebuilt(change: Callable[[SavedIndex], dict[str, object]]) -> Callable[[bytes], bytes]:
    """Return what changes an index and gives it the right checksum, as another version writes it."""

    def forge(data: bytes) -> bytes:
        saved = msgspec.msgpack.decode(data[: -len(checksum_trailer(b""))], type=SavedIndex)
        return sealed(msgspec.msgpack.encode(msgspec.structs.replace(saved, **change(saved))))

    return forge


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[: len(data) // 2],
        lambda data: bytes([data[0] ^ 1]) + data[1:],
        lambda _: b"",
        lambda _: sealed(b"cposix\nsystem\n(S'touch forged'\ntR."),
        lambda _: sealed(b"\x91" * 100_000),
    ],
)  # fmt: skip
def test_damaged_index_is_made_again(
    shards: list[Path], read: list[Path], tmp_path: Path, damage: Callable[[bytes], bytes],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    cache = tmp_path / "cache"
    good = load(shards, cache)
    path = index_file(cache)
    path.write_bytes(damage(path.read_bytes()))
    assert load(shards, cache) == good
    assert len(read) == 4
    assert "the index of shards is damaged" in capsys.readouterr().err
    assert load(shards, cache) == good
    assert len(read) == 4


def test_index_of_another_version_is_made_again(shards: list[Path], read: list[Path], tmp_path: Path) -> None:
    load(shards, tmp_path / "cache")
    path = index_file(tmp_path / "cache")
    path.write_bytes(rebuilt(lambda saved: {"version": saved.version + 1})(path.read_bytes()))
    load(shards, tmp_path / "cache")
    assert len(read) == 4


def test_without_a_cache_headers_are_read_again(
    shards: list[Path], read: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert load(shards, None) == load(shards, None)
    assert len(read) == 4
    with pytest.raises(UserError, match="TRAIN_CACHE_DIR="):
        load(shards, blocked)


def load_alone(arguments: tuple[list[Path], Path]) -> int:
    return len(load(*arguments))


def test_processes_that_start_at_once_agree(shards: list[Path], tmp_path: Path) -> None:
    with ProcessPoolExecutor(4) as pool:
        assert set(pool.map(load_alone, [(shards, tmp_path / "cache")] * 8)) == {5}
    assert not list(tmp_path.glob("cache/images-*/.*"))
