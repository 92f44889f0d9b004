"""A run whose folder is in object storage: its lock uploads the folder while it trains.

Of a sharded run each node has a copy, and every rank uploads its own part of a checkpoint.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from entrypoint.core.console import log
from entrypoint.core.errors import ExitCode, UserError
from entrypoint.core.files import exists, is_file, read_regular
from entrypoint.core.process import start_thread
from entrypoint.core.settings_base import ParsedSettings
from train.checkpoint.folder import prepare, remove_tree
from train.checkpoint.store import OWNER, RunStore
from train.distributed.process_group import ProcessGroup
from train.lock_file import RunLock
from train.report.metrics import disk_errors_as_user_errors
from train.settings import TrainSettings

# The other ranks wait in a collective, which has a time limit, so long at once.
POLL_S = 5.0


class StoredRunLock(RunLock):
    """A lock on a run's folder here, and on the run in storage.

    One thread uploads. What is saved meanwhile is uploaded next. The end of the process does not wait for it.
    """

    def __init__(self, store: RunStore, stale_s: float) -> None:
        super().__init__(stale_s)
        self.store, self.change = store, threading.Condition()
        self.asked = self.done = 0
        self.error: UserError | None = None
        self.is_new = False

    def acquire(self, folder: Path) -> None:
        """Lock the folder here, then the run in storage, and copy it, once; raises `UserError` and OSError."""
        if self.folder != folder:
            self.__exit__(None, None, None)  # of a run that has no checkpoint to resume from
            super().acquire(folder)
            self.store.own(folder.name, is_new=self.is_new and not exists(folder / OWNER))

    @property
    def is_held(self) -> bool:
        """Return whether no other process has taken the run since."""
        return super().is_held and not self.store.is_lost

    def upload(self) -> None:
        """Begin to upload what is new, or what is new when the upload ends that goes on."""
        with self.change:
            if not self.asked:
                start_thread(self.run)
            self.asked += 1
            self.change.notify_all()

    def run(self) -> None:
        """Upload whenever it is asked for; the first failure of several is printed, and all are tried again."""
        while self.folder:
            with self.change:
                self.change.wait_for(lambda: self.asked > self.done)
                asked, before, self.error = self.asked, self.error, None
            try:
                self.store.push(self.folder)
            except UserError as error:
                self.error = error
                if not before and not self.store.is_lost:
                    log(f"warning: {error} Training goes on.")
            with self.change:
                self.done = asked
                self.change.notify_all()

    def finish_upload(self, folder: Path, until: float) -> str | None:
        """Wait for the last upload, at most `POLL_S` seconds; return the run's place in storage, None if it goes on.

        Raises `UserError` if it failed, or if it goes on after `until` (time.monotonic()).
        """
        with self.change:
            is_over = self.change.wait_for(
                lambda: self.done == self.asked, max(0.0, min(POLL_S, until - time.monotonic()))
            )
        if not is_over and time.monotonic() < until:
            return None
        error = self.error if is_over else f"{self.store.url}: the time was too short."
        if error:
            raise UserError(f"{error} What is missing there is in {folder} alone.", ExitCode.MACHINE)
        return f"{self.store.url}/{folder.name}"


def make_lock(parsed: ParsedSettings[TrainSettings], stale_s: float) -> RunLock:
    """Return the lock of a run that is still to be opened, of one in storage after its files were copied.

    Raises `UserError` for a storage that cannot be used.
    """
    url, settings = parsed.url("output_dir"), parsed.values
    if not url or settings.run.evaluate:
        return RunLock(stale_s=stale_s)
    store = RunStore(url, settings.run.output_dir, parsed.sources["output_dir"])
    lock = StoredRunLock(store, stale_s)
    if run := store.run_to_open(settings.run.run_name, settings.run.resume):
        folder = settings.run.output_dir / run
        with disk_errors_as_user_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire(folder)
    lock.is_new = True  # another folder that it is to lock
    return lock


@dataclass(frozen=True)
class NodeCopies:
    """The folders of a run's nodes. `store` is None where all of them see that of rank 0.

    `folder` is this node's, and `has_main` says whether it is that of rank 0, which owns the run and uploads it. All
    ranks must call the methods but `upload`; they raise `UserError` on every rank.
    """

    group: ProcessGroup
    folder: Path
    store: RunStore | None = None
    has_main: bool = True

    @staticmethod
    def find(parsed: ParsedSettings[TrainSettings], lock: RunLock, group: ProcessGroup, folder: Path) -> NodeCopies:
        """Return the folders of a run whose rank 0 has this `folder`."""
        url = parsed.url("output_dir")
        if not url or parsed.values.compute.parallelism == "ddp":
            return NodeCopies(group, folder)
        store = (
            lock.store
            if isinstance(lock, StoredRunLock)
            else RunStore(url, parsed.values.run.output_dir, parsed.sources["output_dir"])
        )
        owner = store.copy / folder.name / OWNER
        text = read_regular(owner) if is_file(owner) else ""
        store.owned, wanted = group.run_on_main(lambda: (store.owned, text), tuple[str, str])
        if all(group.gather(text == wanted, bool)):
            return NodeCopies(group, folder)
        if text != wanted:  # a folder of its own: another node may share this one, or the run was here before
            node = f"{group.node_of(group.rank)}-{os.environ.get('GROUP_RANK', '')}"
            store.copy = store.copy.with_name(f"{store.copy.name}-{node}")
        return NodeCopies(group, store.copy / folder.name, store, text == wanted)

    def begin(self, checkpoint: Path) -> None:
        """Make the temporary folder of a checkpoint on each node."""

        def make() -> None:
            if self.store:
                self.store.in_parts = checkpoint.name
            if self.group.is_main or not self.has_main:
                with disk_errors_as_user_errors(checkpoint.parent):
                    if not self.has_main:  # of checkpoints before
                        remove_tree(checkpoint.parent)
                    prepare(checkpoint)

        self.group.run_on_nodes(make)

    def upload(self, file: Path, checkpoint: Path) -> None:
        """Upload this rank's file of a checkpoint if rank 0 does not see it; raises `UserError`."""
        if self.store and not self.has_main:
            self.store.push_part(file, checkpoint)

    def fetch(self, checkpoint: Path) -> Path:
        """Return where a checkpoint of rank 0 is on this node, after what it lacks there was copied."""
        if not (store := self.store):
            return checkpoint
        here = self.folder / checkpoint.parent.name / checkpoint.name

        def copy() -> None:
            if not self.has_main:
                remove_tree(here.parent)
                store.complete(here)

        self.group.run_on_main(lambda: store.publish(here))
        self.group.run_on_nodes(copy)
        return here
