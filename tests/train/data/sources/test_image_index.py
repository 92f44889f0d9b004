"""The index of images is kept, checked when it is read, and made again when shards, folders or the index changed."""

from __future__ import annotations

import os
import time
import tracemalloc
from array import array
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
import pytest

from entrypoint.core.files import checksum_trailer
from tests.conftest import refusal
from tests.train.data.shard_files import samples, write_tar
from train.data.sources import image_folder, shards as shards_module
from train.data.sources.image_file import CHANGED_SHARD, FileList, TarMember, read_file
from train.data.sources.image_folder import list_split
from train.data.sources.image_index import Index, SavedIndex, load_index, state_of
from train.data.sources.shards import build_index
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

    def count(path: Path, task: str) -> object:
        seen.append(path)
        return read_shard(path, task)

    monkeypatch.setattr(shards_module, "read_shard", count)
    return seen


def load_shards(shards: list[Path], cache: Path | None) -> Index:
    folder = shards[0].parent
    return load_index(folder, shards, cache, partial(build_index, folder, shards))


def load(shards: list[Path], cache: Path | None) -> list[tuple[str, bytes, int]]:
    index = load_shards(shards, cache)
    files = index.files
    return [(files.relative(row), read_file(files[row]), label) for row, label in enumerate(index.labels)]


def index_file(cache: Path) -> Path:
    (path,) = cache.glob("images-*/*.index")
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
    member = load_shards(shards, tmp_path / "cache").files[0]
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
    assert "the index of images is damaged" in capsys.readouterr().err
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
    refusal(load, shards, blocked, match="TRAIN_CACHE_DIR=")


def load_alone(arguments: tuple[list[Path], Path]) -> int:
    return len(load(*arguments))


@pytest.mark.launch
def test_processes_that_start_at_once_agree(shards: list[Path], tmp_path: Path) -> None:
    with ProcessPoolExecutor(4) as pool:
        assert set(pool.map(load_alone, [(shards, tmp_path / "cache")] * 8)) == {5}
    assert not list(tmp_path.glob("cache/images-*/.*"))


def test_image_takes_at_most_24_bytes(tmp_path: Path) -> None:
    count, per_shard = 200_000, 10_000
    paths = [tmp_path / f"{number}.tar" for number in range(count // per_shard)]

    def build() -> Index:
        files, labels = FileList(tmp_path), array("q", [number % 1000 for number in range(count)])
        for path in paths:
            path.touch()
            shard = state_of(path)
            for row in range(per_shard):
                files.append(TarMember(shard, row * 110 * 1024 + 3, 110_000))
        return Index(files, labels, tuple(files.shards))

    built = load_index(tmp_path, paths, tmp_path / "cache", build)
    tracemalloc.start()
    index = load_index(tmp_path, paths, tmp_path / "cache", build)
    taken, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    buffers = [*vars(index.files).values(), index.labels]
    assert sum(memoryview(one).nbytes for one in buffers if isinstance(one, (array, bytearray))) <= 24 * count
    assert taken < 26 * count, "arrays take up to a sixteenth more, which is not touched"
    assert peak < 52 * count
    assert [index.files[row] for row in (0, count - 1)] == [built.files[row] for row in (0, count - 1)]


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a split of two classes that is large enough for an index, and that has not just changed."""
    monkeypatch.setattr(image_folder, "INDEXED_IMAGES", 4)
    for label in range(2):
        (tmp_path / f"split/{label}/deep").mkdir(parents=True)
        for name in ("a.jpg", "b.jpg", "deep/c.jpg"):
            (tmp_path / f"split/{label}" / name).touch()
    age(tmp_path / "split")
    return tmp_path / "split"


def age(folder: Path) -> None:
    for place in (folder, *folder.rglob("*")):
        os.utime(place, (time.time() - 60, time.time() - 60))


def names_of(folder: Path) -> list[str]:
    listing = list_split(folder, ("0", "1"), folder.parent / "cache")
    assert [name.startswith("1") for name in map(listing.files.name, range(len(listing)))] == [
        *map(bool, listing.labels)
    ]
    return [listing.files.name(row) for row in range(len(listing))]


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of the folders that are listed from now on."""
    seen: list[str] = []
    scandir = os.scandir

    def count(folder: object) -> object:
        if isinstance(folder, Path):
            seen.append(f"{folder.parent.name}/{folder.name}")
        return scandir(folder)  # type: ignore[call-overload]

    monkeypatch.setattr("os.scandir", count)
    return seen


def test_large_folder_is_listed_once(large: Path, listed: list[str]) -> None:
    first = names_of(large)
    assert first == [f"{label}/{name}" for label in (0, 1) for name in ("a.jpg", "b.jpg", "deep/c.jpg")]
    assert set(listed) == {"split/0", "split/1", "0/deep", "1/deep"}
    listed.clear()
    assert names_of(large) == first
    assert set(listed) == {"split/0", "0/deep"}, "the first class says how large the split is"


@pytest.mark.parametrize("place", ["0", "1/deep", "."])
def test_folder_that_changed_is_listed_again(large: Path, place: str) -> None:
    names_of(large)
    (large / place / "d.jpg").touch()
    assert ("d.jpg" in "".join(names_of(large))) == (place != ".")
    (large / place / "d.jpg").unlink()
    assert "d.jpg" not in "".join(names_of(large))


def test_file_that_comes_while_the_rest_is_listed_is_found(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scandir = os.scandir

    def change(folder: object) -> object:
        if not isinstance(folder, Path):
            return scandir(folder)  # type: ignore[call-overload]
        found = list(scandir(folder))
        if folder == large / "1" and not (large / "1/late.jpg").exists():
            (large / "1/late.jpg").touch()
            os.utime(large / "1", (time.time() - 30, time.time() - 30))  # as if the rest took half a minute
        return iter(found)

    monkeypatch.setattr("os.scandir", change)
    assert "1/late.jpg" not in names_of(large)
    assert "1/late.jpg" in names_of(large)


def test_index_is_of_these_classes_only(large: Path) -> None:
    names_of(large)
    (large / "05").mkdir()
    (large / "05/a.jpg").touch()
    age(large)
    listing = list_split(large, ("0", "05", "1"), large.parent / "cache")
    assert [listing.classes[label] for label in listing.labels] == [
        listing.files.name(row).partition("/")[0] for row in range(len(listing))
    ]


def test_folder_that_has_just_changed_is_not_kept(large: Path) -> None:
    os.utime(large / "1")
    names_of(large)
    assert not list(large.parent.glob("cache/*/*.index"))
    age(large)
    names_of(large)
    index_file(large.parent / "cache")


def test_entries_that_cannot_be_used_are_not_kept(large: Path) -> None:
    (large / "0/link.jpg").symlink_to("nowhere")
    age(large / "1")
    os.utime(large / "0", (time.time() - 60, time.time() - 60))
    listing = list_split(large, ("0", "1"), large.parent / "cache")
    assert len(listing.unreadable) == 1
    assert not list(large.parent.glob("cache/*/*.index"))


def test_long_listing_says_how_far_it_is(
    large: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names_of(large)
    assert "listing" not in capsys.readouterr().err
    monkeypatch.setattr(image_folder, "SILENT_S", -1.0)
    (large / "0/d.jpg").touch()
    names_of(large)
    assert f"listing {large}: 1 of 2 classes, 4 images so far" in capsys.readouterr().err
