"""Runs in object storage, as `TRAIN_OUTPUT_DIR=s3://bucket/runs` names them; fsspec reads and writes it.

A run trains in a copy of its folder on this machine. A checkpoint's SHA256SUMS is uploaded last, so what has one is
whole. Who trains a run creates the next of its numbered owner objects, which only one process can. The highest number
owns the run. The one before then uploads no more.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

from entrypoint.core.errors import ExitCode, UserError, first_line, printable
from entrypoint.core.files import atomic_write_text, exists, is_file, read_regular, replace_symlink
from entrypoint.core.setting_types import URL, PathOrUrl, find_text_problem
from train.checkpoint import folder as checkpoints
from train.checkpoint.metadata import CHECKSUM_FILE, MODEL, read_checksums
from train.lock_file import LOCK_NAME, folder_lock
from train.settings import copy_folder

# Objects besides those of a run's folder; on this machine OWNER has the texts of the owner objects that it created.
OWNER, LATEST = ".owner", "latest"
OWNER_NUMBER = re.compile(rf".*/{re.escape(OWNER)}-(\d+)", re.ASCII | re.DOTALL)
# What is not copied.
NOTHING, TENSORS = re.compile("(?!)"), re.compile(r".*\.safetensors", re.DOTALL)
OF_CHECKPOINTS = re.compile(rf"{checkpoints.FOLDER}/.*\.safetensors", re.DOTALL)
PIN_TRIES = 9
# A name that cannot lead out of the folder; file systems take at most 255 bytes.
NAME = re.compile(rb"[^./\x00-\x1f\x7f][^/\x00-\x1f\x7f]{0,254}")
STEP_FOLDER = re.compile(rf"(?:.*/)?{checkpoints.FOLDER}/(step-\d+)/[^/]+", re.ASCII | re.DOTALL)


class RunStore:
    """Runs below a URL, and their copies in the folder `copy`; `source` is the setting that names them.

    Its methods raise `UserError` for a storage that cannot be used.
    """

    def __init__(self, url: str, copy: Path, source: str) -> None:
        self.url, self.copy, self.source = url.rstrip("/"), copy, printable(source)
        try:
            from fsspec.core import url_to_fs

            self.files, self.root = url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError) as error:  # no driver for this kind of URL
            fix = "Run: pip install 'reference-training[storage]', or the package that it names."
            raise UserError(f"{self.source}: {printable(first_line(error))}. {fix}", ExitCode.MACHINE) from None
        if not self.root.strip("/") or "::" in url:
            raise UserError(f"{self.source}: names no bucket. Write it as s3://bucket/runs.")
        self.files.auto_mkdir = True  # of a file system with folders
        self.owned, self.is_lost = "", False
        self.in_parts = ""  # the newest checkpoint of which other ranks upload parts
        self.sent: dict[str, object] = {}

    @contextmanager
    def errors(self, verb: str) -> Iterator[None]:
        """Raise `UserError` for what fsspec and its drivers raise, each of them its own, and for this disk."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            reason = printable(first_line(error)) or type(error).__name__
            is_full = verb == "read" and getattr(error, "errno", 0) in (errno.ENOSPC, errno.EDQUOT)
            if isinstance(error, OSError) and (is_full or str(error.filename or "").startswith(str(self.copy))):
                raise UserError(f"{self.copy}: cannot be written ({error.strerror}). Set XDG_CACHE_HOME.") from None
            fix = "Check its address, the credentials and the network."
            raise UserError(f"{self.source}: cannot be {verb} ({reason}). {fix}", ExitCode.MACHINE) from None

    def text(self, name: str) -> str:
        """Return the text of an object, empty if there is none."""
        try:
            return str(self.files.cat_file(f"{self.root}/{name}").decode(errors="replace"))
        except FileNotFoundError as error:
            if getattr(error.__cause__, "response", {}).get("Error", {}).get("Code") == "NoSuchBucket":
                raise
            return ""

    def run_to_open(self, run_name: str | None, resume: str) -> str:
        """Return the run to write to or to resume, empty for a new one without a name."""
        with self.errors("read"):
            latest = self.text(LATEST).strip()  # asked for in any case: an error comes before a run begins
            if run_name or resume != "auto":
                return run_name or ""
            if not NAME.fullmatch(os.fsencode(latest)) or latest == LATEST:
                return ""
            self.copy.mkdir(parents=True, exist_ok=True)
            replace_symlink(self.copy / LATEST, latest)
            return latest

    def last_owner(self, run: str) -> tuple[int, str]:
        """Return the number and the text of a run's owner, 0 for none."""
        owners = map(OWNER_NUMBER.fullmatch, self.files.find(f"{self.root}/{run}", maxdepth=1))
        number = max((int(match[1]) for match in owners if match), default=0)
        return number, self.text(f"{run}/{OWNER}-{number}")

    def own(self, run: str, *, is_new: bool) -> None:
        """Become a run's owner, then copy what the owner before has left, unless this machine was that.

        Raises `UserError` for one that `is_new` and has an owner.
        """
        folder, token = self.copy / run, os.urandom(8).hex()
        with self.errors("written"):
            number, before = self.last_owner(run)
            tokens = read_regular(folder / OWNER).split() if is_file(folder / OWNER) else []
            if before in ("", *tokens):  # then the copy here is whole, also if this process is killed now
                atomic_write_text(folder / OWNER, "\n".join([*tokens, token]))
            last = before
            while last != token:
                if number and is_new:
                    raise UserError(f"{self.url}/{run}: another process begins this run. Set TRAIN_RUN_NAME.")
                with suppress(FileExistsError):  # another process was faster, or an answer was lost
                    self.files.pipe_file(f"{self.root}/{run}/{OWNER}-{number + 1}", token.encode(), mode="create")
                number, last = self.last_owner(run)
                before = before if last == token else last
            self.owned = f"{run}/{OWNER}-{number + 1}"  # what the next owner creates
            if before and before not in tokens:
                self.move_aside(folder)
                self.copy_files(run, NOTHING)
                atomic_write_text(folder / OWNER, token)
        for path in filter(checkpoints.is_checkpoint, checkpoints.list_newest_first(folder / checkpoints.FOLDER)):
            self.complete(path)

    def move_aside(self, folder: Path) -> None:
        """Keep an older copy of a run under another name, in place of one before; OWNER goes first."""
        old = folder.with_name(f".{folder.name}.{'old' if exists(folder / OWNER) else 'partial'}")
        checkpoints.remove_tree(old)
        old.mkdir()
        for name in sorted(os.listdir(folder)):
            if name != LOCK_NAME:
                (folder / name).rename(old / name)

    def copy_files(self, run: str, left_out: re.Pattern[str]) -> None:
        """Copy the files of a run to this machine; raises what fsspec raises."""
        base = f"{self.root}/{run}".rstrip("/")
        for is_last in (False, False, True):  # what is removed meanwhile is no longer listed
            names = wanted_names(self.files.find(base), base, left_out)
            here = [str(self.copy / run / name) for name in names]
            try:
                if names:
                    self.files.get([f"{base}/{name}" for name in names], here)
            except FileNotFoundError:
                if is_last:
                    raise
            else:
                return

    def read(self, run: str = "", *, tensors: bool) -> None:
        """Copy a run, or all of them, for a reader, unless nothing has changed there since the last time."""
        self.copy.mkdir(parents=True, exist_ok=True)
        base, mark = f"{self.root}/{run}".rstrip("/"), self.copy.with_name(f".{self.copy.name}.state")
        with self.errors("read"), folder_lock(mark.with_suffix(".lock"), "another process that copies this run"):
            there = self.files.find(base, detail=True)
            whole = f"{base}/{MODEL}.safetensors" in there  # then nothing else is needed to use it
            left_out = (OF_CHECKPOINTS if whole else NOTHING) if tensors else TENSORS
            state = [(path, about["size"], about.get("ETag", about.get("mtime"))) for path, about in there.items()]
            digest = hashlib.blake2b(repr((left_out, state)).encode()).hexdigest()
            if not is_file(mark) or read_regular(mark) != digest:
                checkpoints.remove_tree(mark)
                checkpoints.remove_tree(self.copy / run)
                self.copy_files(run, left_out)
                atomic_write_text(mark, digest)

    @property
    def mine(self) -> Any:
        """The file system to change this process's run; raises `UserError` if another process owns that now."""
        self.is_lost = self.files.exists(f"{self.root}/{self.owned}")
        if self.is_lost:
            run = self.owned.partition("/")[0]
            raise UserError(f"{self.url}/{run}: another process owns this run now. Nothing more is saved there.")
        return self.files

    def push(self, folder: Path) -> None:
        """Upload what is new in the folder of the owned run: the newest checkpoint and the best one first, whole.

        What the run has removed is removed there at the end. Raises `UserError`, also if another process owns the run.
        """
        pinned = self.copy / f".{folder.name}.upload"
        with self.errors("written"):
            for path in self.pin(folder / checkpoints.FOLDER, pinned):
                self.push_checkpoint(path, f"{folder.name}/{checkpoints.FOLDER}/{path.name}")
            best = pinned / checkpoints.BEST
            if exists(best):
                name = checkpoints.best_checkpoint(pinned).name.encode()
                self.mine.pipe_file(f"{self.root}/{folder.name}/{checkpoints.FOLDER}/{best.name}", name)
            self.push_files(folder)
            self.mine.pipe_file(f"{self.root}/{LATEST}", folder.name.encode())
            self.remove_others(folder / checkpoints.FOLDER, os.listdir(pinned))

    def pin(self, folder: Path, pinned: Path) -> list[Path]:
        """Return hard links of the newest checkpoint and the best one, which the run may remove meanwhile.

        Where there are no links they are copies. Raises OSError.
        """
        for link in [*[os.link] * PIN_TRIES, *[shutil.copy2] * PIN_TRIES]:
            checkpoints.remove_tree(pinned)
            pinned.mkdir()
            best = checkpoints.best_checkpoint(folder)
            whole = list(filter(checkpoints.is_checkpoint, checkpoints.list_newest_first(folder)))
            with suppress(shutil.Error, FileNotFoundError):  # of one that is removed just now
                for path in [*whole[:1], *(path for path in whole[1:] if path.name == best.name)]:
                    shutil.copytree(path, pinned / path.name, copy_function=link)  # type: ignore[arg-type]
                if exists(pinned / best.name):
                    checkpoints.point_to_best(pinned / best.name)
                return checkpoints.list_newest_first(pinned)
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(pinned))

    def push_checkpoint(self, path: Path, name: str) -> None:
        """Upload the files of a checkpoint that differ from what is there."""
        text = read_regular(path / CHECKSUM_FILE)
        if self.sent.get(name) == text:
            return
        there = {line.partition("  ")[2]: line for line in self.text(f"{name}/{CHECKSUM_FILE}").splitlines()}
        new = [
            (file in there, file)
            for file, digest in read_checksums(path).items()
            if there.get(file) != f"{digest}  {file}"
        ]
        for replaces, file in sorted(new):
            if not exists(path / file):
                self.files.info(f"{self.root}/{name}/{file}")  # another rank has uploaded it; raises if not
                continue
            if replaces and there:  # as late as possible: from here on there is no whole checkpoint of this name
                there.clear()
                self.mine.rm_file(f"{self.root}/{name}/{CHECKSUM_FILE}")
            self.mine.put_file(str(path / file), f"{self.root}/{name}/{file}")
        self.mine.pipe_file(f"{self.root}/{name}/{CHECKSUM_FILE}", text.encode())
        self.sent[name] = text

    def push_files(self, folder: Path) -> None:
        """Upload the files of a run besides its checkpoints, where they changed."""
        others = [place for place in folder.glob("[!.]*") if place.name != checkpoints.FOLDER]
        for path in chain(others, *(place.rglob("[!.]*") for place in others)):
            name = f"{folder.name}/{path.relative_to(folder).as_posix()}"
            if not path.is_file():
                continue
            state = (path.stat().st_size, path.stat().st_mtime_ns)
            if self.sent.get(name) != state:
                self.mine.pipe_file(f"{self.root}/{name}", path.read_bytes())
                self.sent[name] = state

    def push_part(self, file: Path, checkpoint: Path) -> None:
        """Upload a file of a checkpoint that is whole only with the parts of other ranks, and remove it here.

        Raises `UserError`.
        """
        with self.errors("written"):
            self.mine.put_file(str(file), f"{self.root}/{checkpoint.relative_to(self.copy).as_posix()}/{file.name}")
            file.unlink()

    def complete(self, checkpoint: Path) -> None:
        """Copy the files of a checkpoint that are not here, if they are in storage; raises `UserError`."""
        name = checkpoint.relative_to(self.copy).as_posix()
        with self.errors("read"), suppress(FileNotFoundError, ValueError):  # what is missing is found when it is read
            if not checkpoints.is_checkpoint(checkpoint):
                content = self.files.cat_file(f"{self.root}/{name}/{CHECKSUM_FILE}")
                checkpoint.mkdir(parents=True, exist_ok=True)
                (checkpoint / CHECKSUM_FILE).write_bytes(content)
            missing = [file for file in read_checksums(checkpoint) if not exists(checkpoint / file)]
            if missing:
                halves = [checkpoint / f".{file}" for file in missing]
                self.files.get([f"{self.root}/{name}/{file}" for file in missing], list(map(str, halves)))
                for half, file in zip(halves, missing, strict=True):
                    half.rename(checkpoint / file)

    def publish(self, checkpoint: Path) -> None:
        """Have a checkpoint whole here and in storage, from which other nodes take it; raises `UserError`."""
        self.complete(checkpoint)
        with self.errors("written"):
            self.push_checkpoint(checkpoint, checkpoint.relative_to(self.copy).as_posix())

    def remove_others(self, folder: Path, kept: Iterable[str]) -> None:
        """Remove the checkpoints that a run no longer has here, each with its checksums first.

        What begins meanwhile stays: it is asked for after the list of what is there, and before that of what is here.
        """
        name = folder.relative_to(self.copy).as_posix()
        steps = [(STEP_FOLDER.fullmatch(path), path) for path in self.files.find(f"{self.root}/{name}")]
        kept = {self.in_parts, *kept, *(path.name for path in checkpoints.list_newest_first(folder))}
        others = [path for match, path in steps if match and match[1] not in kept]
        for path in sorted(others, key=lambda path: not path.endswith(CHECKSUM_FILE)):
            self.mine.rm_file(path)


def wanted_names(paths: Sequence[str], base: str, left_out: re.Pattern[str]) -> list[str]:
    """Return the files below a place by their names there: no partial checkpoints, hidden or foreign names."""
    whole = {path.rpartition("/")[0] for path in paths if path.endswith(f"/{CHECKSUM_FILE}")}
    named = {path.removeprefix(f"{base}/"): path for path in paths if path.startswith(f"{base}/")}
    return [
        name
        for name, path in named.items()
        if all(NAME.fullmatch(os.fsencode(part)) for part in PurePosixPath(name).parts)
        and (not STEP_FOLDER.fullmatch(path) or path.rpartition("/")[0] in whole)
        and not left_out.fullmatch(name)
    ]


def local_run(text: str, environ: Mapping[str, str], *, tensors: bool = True) -> str:
    """Return a path, or where this machine has a copy of what a URL names; raises `UserError`."""
    if not URL.match(text):
        return text
    if problem := find_text_problem(text, PathOrUrl):
        raise UserError(f"The URL {problem}")
    url = text.rstrip("/")
    store = RunStore(url, copy_folder(f"{url} to read", environ) / url.rpartition("/")[2], url)
    store.read(tensors=tensors)
    if not exists(store.copy):
        raise UserError(f"{store.source}: there is no run. Name the folder of one.")
    return str(store.copy)
