"""Shards, and lists with their images, in object storage: each node copies them once, and reads that copy.

A copy's name has the name, size and ETag of every object, so the change of one makes another copy.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from entrypoint.core.console import log
from entrypoint.core.errors import ExitCode, UserError, count_text, printable, refuse_if
from entrypoint.core.files import exists
from train.checkpoint.store import NAME, RunStore
from train.data.cache_folder import cache_folder
from train.data.sources.image_folder import SILENT_S
from train.data.sources.image_list import ImageList
from train.data.sources.shards import CLASSES_FILE, SHARD_NAME
from train.lock_file import folder_lock
from train.setting_groups.data import DataSettings

# Objects that are copied at once.
AT_ONCE = 16
# What says that an object was changed, best first, by the names of several kinds of storage.
STATES = ("ETag", "etag", "mtime", "Last-Modified", "last_modified", "created")
# A plan that launches nothing copies no more.
MAX_PLAN_BYTES = GIB = 1 << 30
# Size in bytes and state of each object, by its name below the URL.
Objects = dict[str, tuple[int, str]]


def list_stored(
    settings: DataSettings, url: str, list_folder: Callable[[Path], tuple[ImageList, ImageList]], *, launches: bool
) -> tuple[ImageList, ImageList]:
    """Return what `list_folder` finds in the copy of what is below a URL; raises `UserError`, which names the URL.

    Processes of a node that ask at once copy once. Without a launch that follows, only a little is copied.
    """
    store = RunStore(url, cache_folder(settings.cache_dir), f"TRAIN_DATA_DIR={url}")
    with store.errors("read"):
        wanted = find_objects(store, settings.dataset)
        state = repr((store.url, sorted(wanted.items()))).encode(errors="surrogateescape")
        copy = store.copy / f"data-{hashlib.blake2b(state, digest_size=16).hexdigest()}"
        with folder_lock(store.copy / "copying.lock", f"another process that copies {printable(url)}"):
            place = copy if exists(copy) else copy.with_suffix(".part")
            copy_objects(store, wanted, place, launches=launches)  # nothing, if it is whole
            if place != copy:
                if find_objects(store, settings.dataset) != wanted:
                    raise OSError("an object was changed while it was copied")
                place.rename(copy)
    try:
        return list_folder(copy)
    except UserError as error:
        raise UserError(str(error).replace(str(copy), url), error.code) from None


def find_objects(store: RunStore, kind: str) -> Objects:
    """Return the shards and what names their classes, or all of a folder with lists; raises what fsspec raises.

    Raises `UserError` for a storage that does not show changes, and for names that no file can have.
    """
    base = store.root.rstrip("/")
    objects: Objects = {}
    for path, listed in store.files.find(base, detail=True).items():
        name = path.removeprefix(f"{base}/")
        parts = name.split("/")
        is_needed = kind != "shards" or parts[-1] == CLASSES_FILE or SHARD_NAME.fullmatch(parts[-1])
        if not is_needed or any(part.startswith(".") for part in parts):
            continue
        if not all(NAME.fullmatch(os.fsencode(part)) for part in parts):
            raise UserError(f"{store.source}: {printable(name)} is no name of a file. Rename it there.")
        about = listed if listed.get("size") else store.files.info(path)  # a web server's list has no sizes
        state = next((str(about[key]) for key in STATES if about.get(key)), "")
        if not state:
            raise UserError(f"{store.source}: this storage gives no ETag or time of its objects. Copy them yourself.")
        objects[name] = int(about["size"]), state
    if not objects:
        raise UserError(f"{store.source}: no {kind} is there. Name the folder that holds the data.")
    return objects


def copy_objects(store: RunStore, wanted: Objects, folder: Path, *, launches: bool) -> None:
    """Copy the objects that a folder lacks, several at once, and say how far it is if that takes long.

    Raises `UserError` for a disk without room, OSError for an object that does not come whole, and what fsspec raises.
    """
    sizes = {name: size for name, (size, _) in wanted.items() if not has_size(folder / name, size)}
    total, free = sum(sizes.values()), shutil.disk_usage(store.copy).free
    what = f"{total / GIB:,.1f} GiB in {count_text(len(sizes), 'object')}"
    refuse_if(
        {
            f"{store.source}: {what} are not on this machine yet, and a plan copies at most 1 GiB. Start the run, which"
            " copies them.": not launches and total > MAX_PLAN_BYTES,
            f"{store.source}: needs {what} in {store.copy}, which has {free / GIB:,.1f} GiB. Set TRAIN_CACHE_DIR to a"
            " larger disk.": total > free,
        },
        ExitCode.MACHINE,
    )

    def fetch(name: str) -> int:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        store.files.get_file(f"{store.root}/{name}", str(path))
        if not has_size(path, sizes[name]):
            raise OSError(f"{name} came with {path.stat().st_size:,} of {sizes[name]:,} bytes")
        return sizes[name]

    done, due = 0, time.monotonic() + SILENT_S
    with ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            for size in pool.map(fetch, sizes):
                done += size
                if time.monotonic() > due:
                    due = time.monotonic() + 5 * SILENT_S
                    log(f"copying {printable(store.url)}: {done / GIB:,.1f} of {what}")
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def has_size(path: Path, size: int) -> bool:
    """Return whether a file is there with so many bytes."""
    return exists(path) and path.stat().st_size == size
