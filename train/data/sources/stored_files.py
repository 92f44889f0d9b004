"""Shards, and lists of images, in object storage: each node copies what it lacks, and reads that copy.

A copy's name has its object's address, size and ETag, so a changed object gets another one. The data set is a folder of
links to copies, whose name has all of theirs. It is there once all copies are whole.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from entrypoint.core.console import log
from entrypoint.core.errors import ExitCode, UserError, count_text, printable
from entrypoint.core.paths import exists
from train.checkpoint.folder import remove_tree
from train.checkpoint.store import NAME, RunStore
from train.data.cache_folder import cache_folder
from train.data.sources.image_folder import SILENT_S
from train.data.sources.image_list import ImageList
from train.data.sources.label_files import read_table
from train.data.sources.shards import CLASSES_FILE, LARGE_BYTES, SHARD_NAME, SPLIT_NAME
from train.lock_file import folder_lock
from train.settings import TrainSettings

# Requests at once, what each of them asks for, and objects of which the end is waited for before others are asked for.
AT_ONCE, PIECE_BYTES, BATCH = 16, 16 << 20, 1024
LISTS = ("train.csv", "test.csv", "val.csv")
# What says that an object was changed, best first, by the names of several kinds of storage.
STATES = ("ETag", "etag", "mtime", "Last-Modified", "last_modified", "created")
# A plan that launches nothing copies no more.
MAX_PLAN_BYTES = 1 << 30
GIB = 1 << 30


class StoredObject(NamedTuple):
    """An object: its path in its storage, its size in bytes, and what changes with its content."""

    path: str
    size: int
    state: str


def digest_of(value: object) -> str:
    """Return a digest for a name."""
    return hashlib.blake2b(repr(value).encode(errors="surrogateescape"), digest_size=16).hexdigest()


def list_stored(
    settings: TrainSettings, url: str, list_folder: Callable[[Path], tuple[ImageList, ImageList]], *, launches: bool
) -> tuple[ImageList, ImageList]:
    """Return what `list_folder` finds in a copy of what is below a URL; raises `UserError`, which names the URL.

    Without a launch that follows, only a little is copied.
    """
    place = cache_folder(settings.cache_dir) / f"data-{digest_of(url)}"
    try:
        return list_folder(copy_dataset(settings, DataStore(url, place, launches=launches)))
    except UserError as error:
        message = re.sub(rf"{re.escape(str(place))}/[0-9a-f]{{32}}", lambda _: url, str(error))
        raise UserError(message, error.code) from None


def copy_dataset(settings: TrainSettings, store: DataStore) -> Path:
    """Return the folder with copies of the shards, or of the lists and their images; raises `UserError`.

    Processes of a node that ask at once copy once.
    """
    with store.errors("read"):
        listed = store.list_objects()
    description = f"another process that copies {printable(store.url)}"
    with store.errors("read"), folder_lock(store.copy.with_suffix(".lock"), description):
        store.copy.mkdir(exist_ok=True)
        if settings.dataset == "shards":
            names = shard_names(listed, only_test=settings.tests_only)
        else:
            names = [name for name in LISTS if name in listed]
            names = [name for name in names if name != "train.csv"] if settings.tests_only and names[1:] else names
            tables = store.copy_objects({name: listed[name] for name in names})
            rows = chain.from_iterable(read_table(tables / name, settings.task).rows for name in names)
            forms = {form for _, name, _ in rows for form in (name, name.replace("\\", "/"))}
            names += sorted(listed.keys() & map(os.path.normpath, forms))  # the list says what is missing
        return store.copy_objects({name: listed[name] for name in names})


def shard_names(listed: Iterable[str], *, only_test: bool) -> list[str]:
    """Return the objects that are shards or name classes, of those to evaluate as they are found in a folder."""
    places = {name: name.rpartition("/") for name in listed if name.count("/") < 2}
    shards = [name for name, (*_, last) in places.items() if SHARD_NAME.fullmatch(last)]
    splits = {name: match[1] for name in shards if (match := SPLIT_NAME.match(name))}
    wanted = next((split for split in ("test", "val") if only_test and split in splits.values()), "")
    names = [name for name in shards if wanted in ("", splits.get(name))]
    return names + [name for name, (*_, last) in places.items() if last == CLASSES_FILE]


class DataStore(RunStore):
    """The objects of a data set below a URL, and their copies in the folder `copy`."""

    def __init__(self, url: str, copy: Path, *, launches: bool) -> None:
        super().__init__(url, copy, f"TRAIN_DATA_DIR={url}")
        self.launches, self.cache_setting = launches, "TRAIN_CACHE_DIR"
        self.total = self.due = 0.0
        self.done: dict[str, int] = {}
        self.is_stopped = False

    def list_objects(self) -> dict[str, StoredObject]:
        """Return the objects by their names below the URL, without hidden ones; raises what fsspec raises."""
        base = self.root.rstrip("/")
        objects: dict[str, StoredObject] = {}
        for path, about in self.files.find(base, detail=True).items():
            name = path.removeprefix(f"{base}/")
            if not any(part.startswith(".") for part in name.split("/")):
                objects[name] = self.describe(path, about if about.get("size") else self.files.info(path))
        if not objects:
            raise UserError(f"{self.source}: nothing is there. Name the folder that holds the data.")
        return objects

    def describe(self, path: str, about: Mapping[str, object]) -> StoredObject:
        """Return an object by what its storage says of it; raises `UserError` if a change of it would not be seen."""
        state = next((str(about[key]) for key in STATES if about.get(key)), "")
        if not state:
            raise UserError(f"{self.source}: this storage gives no ETag or time of its objects. Copy them yourself.")
        return StoredObject(path, int(str(about["size"])), state)

    def copy_objects(self, wanted: Mapping[str, StoredObject]) -> Path:
        """Return a folder with links to copies of these objects; raises `UserError`, and what fsspec raises."""
        for name in wanted:
            if not all(NAME.fullmatch(os.fsencode(part)) for part in name.split("/")):
                raise UserError(f"{self.source}: {printable(name)} is no name of a file. Rename it there.")
        folder = self.copy / digest_of(sorted(wanted.items()))
        self.fetch_all([item for item in wanted.values() if not self.is_here(item)])
        if not exists(folder):
            building = folder.with_suffix(".part")
            remove_tree(building)
            building.mkdir()
            for name, item in wanted.items():
                link = building / name
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(self.copy.absolute() / digest_of(item))
            building.rename(folder)
        return folder

    def is_here(self, item: StoredObject) -> bool:
        """Return whether this machine has a whole copy."""
        path = self.copy / digest_of(item)
        return exists(path) and path.stat().st_size == item.size

    def fetch_all(self, missing: list[StoredObject]) -> None:
        """Copy objects, several at once, and say how far it is if that takes long."""
        total = sum(item.size for item in missing)
        free = shutil.disk_usage(self.copy).free
        what = f"{total / GIB:,.1f} GiB in {count_text(len(missing), 'object')}"
        if not self.launches and total > MAX_PLAN_BYTES:
            raise UserError(
                f"{self.source}: {what} are not on this machine yet, and a plan copies at most 1 GiB. Start the run,"
                " which copies them.",
                ExitCode.MACHINE,
            )
        if total > free:
            raise UserError(
                f"{self.source}: needs {what} in {self.copy.parent}, which has {free / GIB:,.1f} GiB. Set"
                " TRAIN_CACHE_DIR to a larger disk.",
                ExitCode.MACHINE,
            )
        if total >= LARGE_BYTES:
            log(f"copying {what}, of {printable(self.url)} to {self.copy}")
        self.total, self.due, self.done = total, time.monotonic() + SILENT_S, {}
        for start in range(0, len(missing), BATCH):
            with ThreadPoolExecutor(AT_ONCE) as pool:
                try:
                    list(pool.map(self.fetch, missing[start : start + BATCH]))
                except BaseException:
                    self.is_stopped = True
                    pool.shutdown(cancel_futures=True)
                    raise

    def fetch(self, item: StoredObject) -> None:
        """Copy an object, and say how far all is; raises OSError if it is not whole or was changed meanwhile."""
        part = self.copy / f"{digest_of(item)}.part"
        with part.open("wb") as file:
            for start in range(0, item.size, PIECE_BYTES):
                if self.is_stopped:
                    raise OSError("the copy was stopped")
                piece = {"start": start, "end": min(start + PIECE_BYTES, item.size)} if item.size > PIECE_BYTES else {}
                self.done[item.path] = start + file.write(self.files.cat_file(item.path, **piece))
                if time.monotonic() > self.due:
                    self.due = time.monotonic() + 5 * SILENT_S
                    done = sum(list(self.done.values())) / GIB
                    log(f"copying {printable(self.url)}: {done:,.1f} of {self.total / GIB:,.1f} GiB")
        name = item.path.rpartition("/")[2]
        if (size := part.stat().st_size) != item.size:
            raise OSError(f"{name} came with {size:,} of {item.size:,} bytes")
        if self.describe(item.path, self.files.info(item.path)) != item:
            raise OSError(f"{name} was changed while it was copied")
        part.rename(part.with_suffix(""))
