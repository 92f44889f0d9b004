"""The decoded cache: keyed by content, whole or absent, built once however many ask."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from entrypoint.core.errors import UserError
from tests.conftest import paint
from train.data.cache import CacheEntry, cache_folder, load_or_build
from train.data.decoding import decode_splits
from train.data.image_folder import list_splits
from train.data.workers import WorkerPoolSpec

SHAPE = (3, 16, 16)
CREW = WorkerPoolSpec(frozenset(os.sched_getaffinity(0)), 2)


def load(image_folder: Path, folder: Path, policy: str = "error", count: Path | None = None) -> CacheEntry:
    listings = list_splits(image_folder)

    def build(target: Path) -> dict[str, object]:
        if count:
            with count.open("a") as file:
                file.write("built\n")
        return decode_splits(listings, SHAPE, policy, CREW, target)

    folder.mkdir(exist_ok=True)
    return load_or_build(listings, SHAPE, policy, folder, build)


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


def test_cache_finds_equal_content_elsewhere(image_folder: Path, tmp_path: Path) -> None:
    count = tmp_path / "count"
    load(image_folder, tmp_path / "cache", count=count)
    shutil.copytree(image_folder, tmp_path / "copy")
    load(tmp_path / "copy", tmp_path / "cache", count=count)
    assert builds(count) == 1


def test_cache_detects_change_with_old_size_and_mtime(image_folder: Path, tmp_path: Path) -> None:
    before = load(image_folder, tmp_path / "cache")
    path, other = image_folder / "train/class0/001.png", image_folder / "train/class2/001.png"
    stat, content = path.stat(), other.read_bytes()
    path.write_bytes(content + b"\0" * (stat.st_size - len(content)))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    after = load(image_folder, tmp_path / "cache")
    assert not np.array_equal(before.train_images[1], after.train_images[1])


def test_cache_moved_class_is_new_content(image_folder: Path, tmp_path: Path) -> None:
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

    def die(target: Path) -> dict[str, object]:
        (target / "train_images.npy").write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_or_build(listings, SHAPE, "error", folder, die)
    assert load(image_folder, folder).train_images.shape == (24, 16, 16, 3)


def test_cache_removes_files_of_killed_build(image_folder: Path, tmp_path: Path) -> None:
    left = tmp_path / "cache/.building-old"
    left.mkdir(parents=True)
    (left / "train_images.npy").write_bytes(b"half")
    load(image_folder, tmp_path / "cache")
    assert not left.exists()


def test_cache_unreadable_image_raises(image_folder: Path, tmp_path: Path) -> None:
    (image_folder / "train/class1/000.jpg").write_text("no image")
    with pytest.raises(
        UserError, match=r"class1/000\.jpg: not an image; repair or remove it, or set TRAIN_ON_UNREADABLE_IMAGE"
    ):
        load(image_folder, tmp_path / "cache")


def test_cache_skips_and_lists_unreadable_images(image_folder: Path, tmp_path: Path) -> None:
    (image_folder / "train/class1/000.jpg").write_text("no image")
    (image_folder / "test/class0/001.png").write_bytes(b"")
    entry = load(image_folder, tmp_path / "cache", policy="skip")
    assert (len(entry.train_images), len(entry.test_images)) == (23, 11)
    assert entry.train_labels.tolist() == [0] * 8 + [1] * 7 + [2] * 8
    assert entry.notes["skipped"] == [["train", 8, "not an image"], ["test", 1, "empty file"]]


def test_cache_policy_is_part_of_the_key(image_folder: Path, tmp_path: Path) -> None:
    (image_folder / "train/class1/000.jpg").write_text("no image")
    load(image_folder, tmp_path / "cache", policy="skip")
    with pytest.raises(UserError):
        load(image_folder, tmp_path / "cache", policy="error")


def test_cache_folder_of_user_is_used_or_a_fallback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder(None) == tmp_path / ".cache/reference-training"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert cache_folder(None) == tmp_path / f"reference-training-{os.getuid()}"


def test_cache_folder_unwritable_raises(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="TRAIN_CACHE_DIR="):
        cache_folder(tmp_path / "file/below")
