"""Relay what the ranks of a node print: whole lines, in each rank's own order, to the terminal and to files.

Ranks that write to one pipe or terminal cut each other's lines, with PYTHONUNBUFFERED nearly all. So each rank gets
pipes of its own, and one thread reads them. A terminal stays with the first rank that is shown, for its progress bar.
"""

from __future__ import annotations

import errno
import fcntl
import os
import selectors
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from msgspec import Struct

from entrypoint.core.console import log, write_all, write_stderr
from entrypoint.core.errors import UserError, count_text, printable
from entrypoint.core.process import start_thread
from entrypoint.plan.model import OutputPlan

# The size of a pipe, and of one read. Of ranks that print much, more is read at once after a pause.
PIPE_BYTES = 1 << 20
BUSY_BYTES, BUSY_PAUSE_S = 1 << 13, 0.05
# A line that is longer is cut, so that a rank without line ends does not fill the memory.
MAX_LINE_BYTES = 1 << 20
# What is kept of each rank for the end of a failed job.
TAIL_LINES, TAIL_BYTES = 20, 1 << 14
# So a pipe without a reader, which would block, is an error.
LOG_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
# How long after the last rank's end its children may still write.
DRAIN_S = 0.05


class Sink(Struct):
    """Where the entrypoint's own standard output or error goes; both may be the same place."""

    descriptor: int
    is_terminal: bool
    at_line_start: bool = True
    is_closed: bool = False


class Stream(Struct):
    """One rank's standard output or error, or both: the end that is read, what is held back, and the log file."""

    rank: int
    reader: int
    writer: int
    sink: Sink | None
    file: BinaryIO | None = None
    pending: bytes = b""

    def take(self, data: bytes) -> bytes:
        """Return what can be shown: up to the last end of a line.

        A progress bar ends its lines with a carriage return. One at the very end may be half of a line's end.
        """
        data = self.pending + data if self.pending else data
        cut = max(data.rfind(b"\n"), data.rfind(b"\r", 0, -1)) + 1
        if not cut and len(data) > MAX_LINE_BYTES:
            cut = len(data)
        self.pending = data[cut:]
        return data[:cut]


class RankOutput:
    """The output of one start of a node's ranks. `open_rank` each, fork, `start` the relay, `close` it at the end."""

    def __init__(self, plan: OutputPlan, restart: int = 0) -> None:
        self.plan, self.restart = plan, restart
        self.streams: list[Stream] = []
        self.tails: dict[int, bytes] = {}
        self.sinks = {1: Sink(1, os.isatty(1)), 2: Sink(2, os.isatty(2))}
        for sink in self.sinks.values():  # another program may have changed what it shares with this one
            os.set_blocking(sink.descriptor, True)
        if os.path.samestat(os.fstat(1), os.fstat(2)):
            self.sinks[2] = self.sinks[1]
        self.first_shown: int | None = None
        self.selector = selectors.DefaultSelector()
        self.wake_reader, self.wake_writer = os.pipe()
        self.thread: threading.Thread | None = None
        self.shown = b""
        self.buffer = memoryview(bytearray(PIPE_BYTES))  # a new one for each read would cost page faults

    def open_rank(self, rank: int) -> tuple[int, int]:
        """Return what a rank's standard output and error are to be; raises `UserError` for a log file.

        The first rank that is shown keeps a terminal as it is, unless its lines are marked or kept. Where both go to
        one place and no file is asked for, they are one pipe, which keeps their order.
        """
        folder = self.log_folder(rank)
        if self.sinks[1] is self.sinks[2] and not folder:
            writer = self.open_stream(rank, self.sinks[1], None)
            return writer, writer
        if not folder:
            return self.open_stream(rank, self.sinks[1], None), self.open_stream(rank, self.sinks[2], None)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            out, err = (
                os.fdopen(os.open(folder / name, LOG_FLAGS, 0o666), "ab") for name in ("stdout.log", "stderr.log")
            )
        except OSError as error:
            raise UserError(
                f"LAUNCH_LOG_DIR={printable(self.plan.log_dir)}: {printable(error.filename)} cannot be written"
                f" ({error.strerror}). Name another folder."
            ) from None
        return self.open_stream(rank, self.sinks[1], out), self.open_stream(rank, self.sinks[2], err)

    def log_folder(self, rank: int) -> Path | None:
        """Return the folder of a rank's log files, None if none is asked for."""
        return Path(self.plan.log_dir, f"attempt_{self.restart}", str(rank)) if self.plan.log_dir else None

    def open_stream(self, rank: int, sink: Sink, file: BinaryIO | None) -> int:
        """Open one stream of a rank, which goes to its log file too; return the end that the rank writes to."""
        shown = not self.plan.shown_ranks or rank in self.plan.shown_ranks
        if shown and self.first_shown is None:
            self.first_shown = rank
        if sink.is_terminal and rank == self.first_shown and not file and not self.plan.prefix:
            return sink.descriptor
        reader, writer = os.pipe()
        with suppress(OSError):  # another user's pipes may have used up what this user may have
            fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self.streams.append(Stream(rank=rank, reader=reader, writer=writer, sink=sink if shown else None, file=file))
        return writer

    def start(self) -> None:
        """Begin to relay, once all ranks are forked."""
        for stream in self.streams:
            os.close(stream.writer)
            os.set_blocking(stream.reader, False)
            self.selector.register(stream.reader, selectors.EVENT_READ, stream)
        self.selector.register(self.wake_reader, selectors.EVENT_READ, None)
        self.thread = start_thread(self.relay)

    def relay(self) -> None:
        """Relay until the job has ended and nothing more comes; a child of a rank may keep its pipe open."""
        ends = False
        while self.streams:
            events, count = self.selector.select(DRAIN_S if ends else None), 0
            for key, _ in events:
                if key.data is None:
                    self.selector.unregister(self.wake_reader)
                    ends = True
                elif key.data in self.streams:  # else the stream before has ended it, as nobody reads them any more
                    count += self.read(key.data)
            if count > BUSY_BYTES:
                time.sleep(BUSY_PAUSE_S)
            if ends and not events:
                break
        for stream in list(self.streams):
            self.end(stream)

    def read(self, stream: Stream) -> int:
        """Read what a rank has printed, pass on what is whole, and return how many bytes came."""
        try:
            data = bytes(self.buffer[: os.readv(stream.reader, [self.buffer])])
        except BlockingIOError:
            return 0
        if not data:
            self.end(stream)
            return 0
        self.tails[stream.rank] = (self.tails.get(stream.rank, b"") + data)[-TAIL_BYTES:]
        if stream.file:
            self.write_file(stream, stream.file, data)
        self.show(stream, stream.take(data))
        return len(data)

    def end(self, stream: Stream) -> None:
        """Pass the rest of a stream on, and forget it."""
        if stream not in self.streams:
            return
        self.streams.remove(stream)
        rest, stream.pending = stream.pending, b""
        self.show(stream, rest)
        self.selector.unregister(stream.reader)
        os.close(stream.reader)
        if stream.file:
            stream.file.close()

    def show(self, stream: Stream, data: bytes) -> None:
        """Write a rank's lines; if nobody reads them any more, ranks that print on get the same error."""
        sink = stream.sink
        if not data or sink is None or sink.is_closed:
            return
        if self.plan.prefix:
            prefix = f"[rank {stream.rank}] ".encode()
            data = prefix + data[:-1].replace(b"\n", b"\n" + prefix) + data[-1:]
        if not sink.at_line_start:
            data = b"\n" + data
        self.shown = (self.shown + data)[-TAIL_BYTES:]
        sink.at_line_start = data.endswith((b"\n", b"\r"))
        try:
            write_all(sink.descriptor, data)
        except OSError as error:
            sink.is_closed = True
            if error.errno != errno.EPIPE:
                log(f"the output of the ranks cannot be written ({error.strerror}). Write it to another place.")
            for unread in [other for other in self.streams if other.sink is sink and not other.file]:
                self.end(unread)

    def write_file(self, stream: Stream, file: BinaryIO, data: bytes) -> None:
        """Append to a rank's log file; print a line when that fails, and go on without the file."""
        try:
            write_all(file.fileno(), data)
        except OSError as error:
            file.close()
            stream.file = None
            log(f"LAUNCH_LOG_DIR={self.plan.log_dir}: cannot be written ({error.strerror}); rank {stream.rank} goes on")

    def close(self, interrupted: Callable[[], bool] = lambda: False) -> None:
        """Wait until all is relayed, after the ranks have ended; `interrupted` is asked whether to stop waiting."""
        if self.thread is None:
            return
        os.write(self.wake_writer, b".")
        while self.thread.is_alive() and not interrupted():
            self.thread.join(0.2)
        if not self.thread.is_alive():
            self.selector.close()
            os.close(self.wake_reader)
            os.close(self.wake_writer)
        self.thread = None

    def print_tail(self, rank: int) -> None:
        """Print the last lines of the rank that failed first, unless they are the last ones on the terminal anyway."""
        lines, folder = self.tails.get(rank, b"").splitlines()[-TAIL_LINES:], self.log_folder(rank)
        if not lines:
            return
        if not self.shown.rstrip().endswith(b"\n".join(lines).rstrip()):
            where = f", whole in {folder}" if folder else ""
            log(f"the last {count_text(len(lines), 'line')} of rank {rank}{where}:")
            for line in lines:
                write_stderr(f"  {line.decode(errors='replace')}")
        elif folder:
            log(f"the output of rank {rank} is in {folder}")
