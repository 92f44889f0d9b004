"""The decoded cache: of these files as they are, whole or absent, built once however many ask."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import paint, refusal
from train.data.cache.image_cache import ARRAYS, CacheEntry, ImageSource, Skipped, decode_splits, load_or_build
from train.data.cache_folder import cache_folder
from train.data.sources.image_folder import list_splits
from train.data.workers import WorkerSpec

SHAPE = (3, 16, 16)
CREW = WorkerSpec(frozenset(os.sched_getaffinity(0)), 2)


def load(image_folder: Path, folder: Path, policy: str = "error", count: Path | None = None) -> CacheEntry:
    listings = list_splits(image_folder)

    def build(target: Path) -> Skipped:
        if count:
            with count.open("a") as file:
                file.write("built\n")
        return decode_splits(listings, SHAPE, policy, CREW, target)

    folder.mkdir(exist_ok=True)
    return load_or_build(ImageSource(listings, SHAPE, policy), cache_folder(folder), build)


def builds(count: Path) -> int:
    return len(count.read_text().splitlines()) if count.exists() else 0


def test_cache_arrays_keep_listing_order(image_folder: Path, tmp_path: Path) -> None:
    entry = load(image_folder, tmp_path / "cache")
    assert entry.train_images.shape == (24, 16, 16, 3)
    assert entry.train_labels.tolist() == [0] * 8 + [1] * 8 + [2] * 8
    means = [entry.train_images[entry.train_labels == label].mean() for label in range(3)]
    assert means == sorted(means)
    assert means[0] < 60 < 190 < means[2]


def test_cache_second_run_decodes_nothing(image_folder: Path, tmp_path: Path) -> None:
    count = tmp_path / "count"
    first = load(image_folder, tmp_path / "cache", count=count)
    again = load(image_folder, tmp_path / "cache", count=count)
    assert builds(count) == 1
    assert np.array_equal(first.train_images, again.train_images)


def test_cache_detects_change_with_old_size_and_mtime(image_folder: Path, tmp_path: Path) -> None:
    before = load(image_folder, tmp_path / "cache")
    path, other = image_folder / "train/class0/001.png", image_folder / "train/class2/001.png"
    stat, content = path.stat(), other.read_bytes()
    path.write_bytes(content + b"\0" * (stat.st_size - len(content)))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    after = load(image_folder, tmp_path / "cache")
    assert not np.array_equal(before.train_images[1], after.train_images[1])


def test_cache_renamed_class_is_decoded_again(image_folder: Path, tmp_path: Path) -> None:
    count = tmp_path / "count"
    load(image_folder, tmp_path / "cache", count=count)
    for split in ("train", "test"):
        (image_folder / split / "class0").rename(image_folder / split / "zebra")
    entry = load(image_folder, tmp_path / "cache", count=count)
    assert builds(count) == 2
    assert entry.train_images[entry.train_labels == 2].mean() < 60


def load_alone(arguments: tuple[Path, Path, Path]) -> float:
    image_folder, folder, count = arguments
    return float(load(image_folder, folder, count=count).train_images.mean())


@pytest.mark.seconds
def test_cache_concurrent_loads_build_once(tmp_path: Path) -> None:
    image_folder, count = tmp_path / "images", tmp_path / "count"
    paint(image_folder / "train", each=60)
    paint(image_folder / "test", each=4)
    (tmp_path / "cache").mkdir()
    with ProcessPoolExecutor(4) as pool:
        means = list(pool.map(load_alone, [(image_folder, tmp_path / "cache", count)] * 8))
    assert len(set(means)) == 1
    assert builds(count) == 1


def test_cache_failed_build_leaves_no_entry(image_folder: Path, tmp_path: Path) -> None:
    listings, folder = list_splits(image_folder), tmp_path / "cache"
    folder.mkdir()

    def die(target: Path) -> Skipped:
        (target / "train_images.npy").write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_or_build(ImageSource(listings, SHAPE, "error"), cache_folder(folder), die)
    assert load(image_folder, folder).train_images.shape == (24, 16, 16, 3)


def test_cache_removes_files_of_killed_build(image_folder: Path, tmp_path: Path) -> None:
    left = tmp_path / f"cache/images-{os.getuid()}/building-old"
    left.mkdir(parents=True)
    (left / "train_images.npy").write_bytes(b"half")
    load(image_folder, tmp_path / "cache")
    assert not left.exists()


def test_cache_unreadable_image_raises(image_folder: Path, tmp_path: Path) -> None:
    (image_folder / "train/class1/000.jpg").write_text("no image")
    refusal(
        load,
        image_folder,
        tmp_path / "cache",
        match=r"class1/000\.jpg: not an image; repair or remove it, or set TRAIN_ON_UNREADABLE_IMAGE",
    )


def test_cache_skips_and_lists_unreadable_images(image_folder: Path, tmp_path: Path) -> None:
    (image_folder / "train/class1/000.jpg").write_text("no image")
    (image_folder / "test/class0/001.png").write_bytes(b"")
    entry = load(image_folder, tmp_path / "cache", policy="skip")
    assert (len(entry.train_images), len(entry.test_images)) == (23, 11)
    assert entry.train_labels.tolist() == [0] * 8 + [1] * 7 + [2] * 8
    assert entry.skipped == (("train", 8, "not an image"), ("test", 1, "empty file"))


def test_cache_policy_is_part_of_the_key(image_folder: Path, tmp_path: Path) -> None:
    (image_folder / "train/class1/000.jpg").write_text("no image")
    load(image_folder, tmp_path / "cache", policy="skip")
    refusal(load, image_folder, tmp_path / "cache", policy="error")


def test_cache_folder_of_user_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder(None) == tmp_path / f".cache/reference-training/images-{os.getuid()}"
    monkeypatch.delenv("HOME")
    refusal(cache_folder, None, match="TRAIN_CACHE_DIR: HOME is not set")


def test_cache_folder_unwritable_raises(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refusal(cache_folder, tmp_path / "file/below", match="TRAIN_CACHE_DIR=")


DAMAGES = int(os.environ.get("CACHE_DAMAGES", "200"))


def damage(kind: int, data: bytearray, draw: random.Random) -> None:
    """Change a file's content in place: a bit, its end, a zeroed part, all of it, or its header."""
    if kind == 0:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    elif kind == 1:
        del data[draw.randrange(len(data)) :]
    elif kind == 2:
        start = draw.randrange(len(data))
        data[start : start + 4096] = bytes(len(data[start : start + 4096]))
    elif kind == 3:
        data.clear()
    else:
        data[draw.randrange(min(128, len(data)))] = draw.randrange(256)


@pytest.mark.slow
def test_cache_any_damage_is_decoded_again(
    image_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache, count, draw = tmp_path / "cache", tmp_path / "count", random.Random(1)
    good = load(image_folder, cache, count=count)
    arrays = {name: np.array(getattr(good, name)) for name in ARRAYS}
    shutil.copytree(cache, tmp_path / "kept")
    changed = 0
    for number in range(DAMAGES):
        shutil.rmtree(cache)
        shutil.copytree(tmp_path / "kept", cache)
        file = draw.choice(sorted(path for path in cache.rglob("*") if path.is_file() and path.stat().st_size))
        data = bytearray(file.read_bytes())
        damage(number % 5, data, draw)
        if data == file.read_bytes():
            continue
        file.write_bytes(data)
        changed += 1
        before = builds(count)
        entry = load(image_folder, cache, count=count)
        assert all(np.array_equal(getattr(entry, name), one) for name, one in arrays.items())
        said = capsys.readouterr().err
        assert said.count("are damaged") == len(said.splitlines()) == builds(count) - before == 1
    assert changed > 0.8 * DAMAGES


def test_cache_missing_file_is_decoded_again(image_folder: Path, tmp_path: Path) -> None:
    count = tmp_path / "count"
    load(image_folder, tmp_path / "cache", count=count)
    for name in ("notes.json", "train_labels.npy"):
        next((tmp_path / "cache").rglob(f"*.images/{name}")).unlink()
        load(image_folder, tmp_path / "cache", count=count)
    assert builds(count) == 3


def run_as(user: int, function: Callable[[], str]) -> str:
    """Return what a function returns in a process of another user."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            text = function()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    os.waitpid(child, 0)
    return text


@pytest.fixture
def shared(image_folder: Path, tmp_path: Path) -> Path:
    """A cache folder that everybody may write into, as /tmp."""
    if os.getuid():
        pytest.skip("needs root, to run as other users")
    for folder in (image_folder, tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and folder.is_relative_to(tempfile.gettempdir()):
            folder.chmod(folder.stat().st_mode | 0o755)
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    (tmp_path / "count").touch()
    (tmp_path / "count").chmod(0o666)
    return folder


def test_users_of_one_folder_have_entries_of_their_own(image_folder: Path, shared: Path, tmp_path: Path) -> None:
    count = tmp_path / "count"

    def use() -> str:
        return str(len(load(image_folder, shared, count=count).train_images))

    assert [run_as(user, use) for user in (4001, 4002, 4002)] == ["24"] * 3
    assert builds(count) == 2


@pytest.mark.parametrize("kind", ["another user's", "open to others", "a link"])
def test_folder_that_others_could_change_is_refused(image_folder: Path, shared: Path, kind: str) -> None:
    folder = shared / "images-4002"
    if kind == "a link":
        (shared / "elsewhere").mkdir(mode=0o777)
        (shared / "elsewhere").chmod(0o777)
        folder.symlink_to("elsewhere")
    else:
        folder.mkdir()
        folder.chmod(0o777)
        if kind == "open to others":
            os.chown(folder, 4002, 4002)
    said = run_as(4002, lambda: str(load(image_folder, shared).skipped))
    assert said == (
        f"UserError: TRAIN_CACHE_DIR={shared}: another user owns images-4002 or can write it. Remove it or name another"
        " folder."
    )
