"""What a tar shard says of its images: where each one is, and its label, by its headers alone."""

from __future__ import annotations

import os
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from entrypoint.core.errors import UserError, first_line, one_line, printable
from entrypoint.core.files import open_regular
from train.data.sources.image_file import BLOCK, FileList, Shard, TarMember
from train.data.sources.targets import MAX_TARGET
from train.setting_groups.data import IMAGE_ENDINGS

# By task, where a JSON member has the label of its image, and what it is.
LABEL_FIELDS = {
    "classify": ("cls", "label", "labels"),
    "multilabel": ("labels", "label"),
    "regress": ("target", "targets", "label"),
}
WANTED = {
    "classify": "A label is a whole number from 0 on",
    "multilabel": "Labels are a list of names, or of 0 and 1 for each class",
    "regress": "A target is a number, or a list of numbers",
}
# Whether a value in a list says that an image has a class or has it not, and whether it is a number to learn.
NUMBERS: dict[str, Callable[[Any], bool]] = {
    "multilabel": lambda value: value in (0, 1),
    "regress": lambda value: type(value) in (int, float) and abs(value) < MAX_TARGET,
}
Label = int | tuple[str | float, ...]
# A key is the path up to the first dot of the name, as in webdataset. Names that begin with a dot have none.
NAME = re.compile(r"((?:.*/)?[^./][^/.]*)\.([^/]*)", re.DOTALL)
# What webdataset takes as a note about the shard.
METADATA = re.compile(r"__[^/]*__", re.DOTALL)
LABEL = re.compile(rb"\s*(\d{1,9})\s*", re.ASCII)
# As many digits as `LABEL` takes.
MAX_LABEL = 10**9 - 1
MAX_CLS_BYTES, MAX_JSON_BYTES = 64, 16 << 20
COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
}
READ_BYTES = 1 << 20
# What is read at once of headers; a page of the page cache.
WINDOW_BYTES = 4096
# A header as nearly all are, of ustar, GNU and pax archives: name, size, checksum and type (a file, or one whose time
# is in the next block). It has no link, no prefix of the name, and numbers as tarfile takes them.
HEADER = re.compile(
    rb"(?=([^\0]{1,100})).{100}(?:[0-7]{6}[0-7 ][ \0]){3}([0-7]{11})[ \0][0-7]{11}[ \0]([0-7]{6})\0 ([0x])\0{100}"
    rb"ustar(?:\0\d\d|  \0).{64}[0-7\0]{16}\0{155}.{12}",
    re.DOTALL,
)
# What webdataset writes in front of each header: the time to a fraction of a second, alone.
TIME = re.compile(rb"(\d{2}) mtime=\d+\.?\d*\n\0", re.ASCII)


class ShardError(Exception):
    """Raised with the problem of a shard, and what to do."""


class Member(NamedTuple):
    """A regular file in a shard: its name, where its headers and its content begin, and how long that is (bytes)."""

    name: str
    headers: int
    start: int
    size: int


@dataclass(slots=True)
class Sample:
    """The members with the same key: their endings, and what holds the label."""

    members: dict[str, Member] = field(default_factory=dict)
    label: int | None = None


def read_shard(path: Path, task: str = "classify") -> tuple[FileList, list[Label]]:
    """Return the images of a shard in order, and their labels.

    Raises `UserError`, and `OSError` for a file that cannot be read.
    """
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            status = os.fstat(file.fileno())
            shard = Shard(path, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            return read_images(file, shard, task)
    except ShardError as error:
        raise UserError(f"{one_line(path)} {error}.") from None
    except OSError as error:
        error.filename = error.filename or str(path)  # the disk fails while it is read
        raise


def read_images(file: BinaryIO, shard: Shard, task: str) -> tuple[FileList, list[Label]]:
    """Return the images of a shard in order, and their labels; raises `ShardError`."""
    start = file.read(max(map(len, COMPRESSED)))
    for magic, name in COMPRESSED.items():
        if start.startswith(magic):
            raise ShardError(f"is compressed by {name}, {NO_RANDOM_READ}")
    if not start:
        raise ShardError("is an empty file. Remove it, or copy it again")
    samples: dict[str, Sample] = {}
    blocks = Blocks(file)
    for member in read_members(blocks, shard.size):
        match = NAME.fullmatch(member.name)
        if match and not METADATA.fullmatch(member.name):
            key, ending = match.groups()
            if (sample := samples.get(key)) is None:
                sample = samples[key] = Sample()
            add_member(sample, ending.lower(), member, blocks if task == "classify" else None)
    if not samples:
        raise ShardError("holds no images. Remove it, or pack some as KEY.jpg with KEY.cls")
    files, labels = FileList(shard.path.parent), list[Label]()
    for key, sample in samples.items():
        image, label = image_of(key, sample, blocks, task)
        headers = (image.start - image.headers) // BLOCK
        files.append(TarMember(shard, image.start + (headers if headers < BLOCK else 0), image.size))
        labels.append(label)
    return files, labels


COPY_AGAIN = "Copy or pack it again"
NO_RANDOM_READ = "so no image can be read by itself. Decompress it to a .tar"


class Blocks:
    """The bytes of a shard, with the last ones that were read: small contents and the next headers are among them."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.window, self.start = file, b"", 0

    def find(self, offset: int, size: int) -> int:
        """Return where in `window` the bytes from an offset on are, as many as are wanted if the file has them."""
        index = offset - self.start
        if index < 0 or index + size > len(self.window):
            self.window, self.start = os.pread(self.file.fileno(), max(size, WINDOW_BYTES), offset), offset
            return 0
        return index

    def read(self, member: Member, limit: int) -> bytes:
        """Return the content of a small member; raises `ShardError` for a large one."""
        if member.size > limit:
            name = printable(member.name)
            raise ShardError(f"has {member.size:,} bytes in {name}, too many for a label. Pack it again")
        index = self.find(member.start, member.size)
        return self.window[index : index + member.size]

    def plain_header(self, index: int) -> re.Match[bytes] | None:
        """Return the match of a header at a place in `window`, None if it is another one, or its checksum is wrong."""
        header = HEADER.match(self.window, index)
        # The lower half of this checksum is 1 and the sum of all bytes, which are less than its modulus.
        if header and int(header[3], 8) + sum(header[3]) + 32 - 256 == (zlib.adler32(header[0]) & 0xFFFF) - 1:
            return header
        return None

    def plain_member(self, offset: int, size: int) -> Member | None:
        """Return the member whose headers begin at an offset, None if tarfile has to read them, or it is cut short."""
        index, start = self.find(offset, 3 * BLOCK), offset + BLOCK
        header = self.plain_header(index)
        if header and header[4] == b"x":
            time = TIME.match(self.window, index + BLOCK)
            is_all = time and int(time[1]) == int(header[2], 8) == len(time[0]) - 1
            header, start = self.plain_header(index + 2 * BLOCK) if is_all else None, start + 2 * BLOCK
        if not header or header[4] == b"x" or start + (length := int(header[2], 8)) > size:
            return None
        return Member(header[1].decode("utf-8", "surrogateescape"), offset, start, length)


def read_members(blocks: Blocks, size: int) -> Iterator[Member]:
    """Yield each regular member; raises `ShardError`. tarfile reads the headers that are not plain."""
    blocks.file.seek(0)
    try:
        with tarfile.open(fileobj=blocks.file, mode="r:", encoding="utf-8", errors="surrogateescape") as archive:
            member = next_member(archive, size)
            while member:
                if member.name:
                    yield member
                plain = None if archive.pax_headers else blocks.plain_member(archive.offset, size)
                if plain:
                    archive.offset = plain.start + -(-plain.size // BLOCK) * BLOCK
                member = plain or next_member(archive, size)
            check_end(blocks.file, archive.offset)
    except (ShardError, OSError):
        raise
    except Exception as error:  # tarfile raises what its parser meets: TarError, ValueError, RecursionError
        reason = first_line(error) or type(error).__name__
        raise ShardError(f"is no whole tar file ({printable(reason)}). {COPY_AGAIN}") from None


def next_member(archive: tarfile.TarFile, size: int) -> Member | None:
    """Return the next member as tarfile reads it, None at the end; one without a name is no regular file.

    Raises `ShardError` for one that cannot be read out of a shard of so many bytes, and what tarfile raises.
    """
    member = archive.next()
    if member is None:
        return None
    archive.members.clear()  # type: ignore[attr-defined]  # tarfile keeps them all
    if member.size < 0:
        raise ShardError(f"has a damaged header at byte {member.offset:,}. {COPY_AGAIN}")
    if (missing := member.offset_data + member.size - size) > 0:
        raise ShardError(f"is cut short: {printable(member.name)} lacks {missing:,} bytes. {COPY_AGAIN}")
    if member.issparse():
        raise ShardError(f"has {printable(member.name)} as a sparse file. Pack it without --sparse")
    return Member(member.name if member.isreg() else "", member.offset, member.offset_data, member.size)


def check_end(file: BinaryIO, offset: int) -> None:
    """Raise `ShardError` unless there are zeros only, and some, from where the headers end.

    tarfile takes a damaged header for the end, and the images behind it would be missing.
    """
    file.seek(offset)
    block = file.read(BLOCK)
    if len(block) < BLOCK:
        raise ShardError(f"is cut short: it has no end mark. {COPY_AGAIN}")
    if any(block):
        raise ShardError(f"has a damaged header at byte {offset:,}. {COPY_AGAIN}")
    while block := next_block(file):
        if block.strip(b"\0"):
            raise ShardError("has files behind its end mark, as tar files joined by cat. Pack them again as one")


def next_block(file: BinaryIO) -> bytes:
    """Return the next bytes of a file, without its holes (lseek(2), SEEK_DATA): they could be of any size."""
    with suppress(OSError):  # ENXIO: nothing but a hole is left
        file.seek(os.lseek(file.fileno(), file.tell(), os.SEEK_DATA))
        return file.read(READ_BYTES)
    return b""


def add_member(sample: Sample, ending: str, member: Member, blocks: Blocks | None) -> None:
    """Add a member to its sample, with the label in a cls if there are `blocks` to read it.

    Raises `ShardError` for a second member of that ending, and for a wrong label.
    """
    if ending in sample.members:
        raise ShardError(f"has {printable(member.name)} twice. Give each sample a key of its own")
    sample.members[ending] = member
    if ending == "cls" and blocks:
        content = blocks.read(member, MAX_CLS_BYTES)
        label = LABEL.fullmatch(content)
        if not label:
            text = printable(content.decode(errors="replace"))
            raise ShardError(f"has '{text}' in {printable(member.name)}. {WANTED['classify']}")
        sample.label = int(label[1])


def label_in_json(blocks: Blocks, member: Member, task: str) -> Label | None:
    """Return the label that a JSON member holds, None if it has none; raises `ShardError` for one of another kind.

    Several labels are their names, or 0 and 1; numbers are as they are.
    """
    name, content = printable(member.name), blocks.read(member, MAX_JSON_BYTES)
    try:
        fields = msgspec.json.decode(content, type=dict[str, object])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        raise ShardError(f"has no JSON object in {name}. Correct it, and pack it again") from None
    field_name = next((known for known in LABEL_FIELDS[task] if known in fields), None)
    if field_name is None:
        return None
    label = fields[field_name]
    if task == "classify" and type(label) is int and 0 <= label <= MAX_LABEL:
        return label
    row = label if isinstance(label, list) else [label]
    if task == "multilabel" and all(isinstance(value, str) for value in row):
        return tuple(row)
    if row and task != "classify" and all(map(NUMBERS[task], row)):
        return tuple(map(float, row))
    fix = ", or set TRAIN_TASK=multilabel" if task == "classify" and isinstance(label, list) else ""
    raise ShardError(f"has {field_name} {printable(label)} in {name}. {WANTED[task]}{fix}")


def image_of(key: str, sample: Sample, blocks: Blocks, task: str) -> tuple[Member, Label]:
    """Return the image of a sample and its label, by its JSON only if it has none in a cls.

    Raises `ShardError` for a sample without an image or with several, and for one without a label.
    """
    endings = sample.members
    images = [endings[ending] for ending in endings if ending in IMAGE_ENDINGS] or [
        member for ending, member in endings.items() if ending.rpartition(".")[2] in IMAGE_ENDINGS
    ]
    if not images:
        listed = ", ".join(map(printable, endings))
        raise ShardError(f"has no image for {printable(key)}, only {listed}. Add or remove it")
    if len(images) > 1:
        raise ShardError(f"has {len(images)} images for {printable(key)}. Give each image a key of its own")
    label: Label | None = sample.label
    if label is None and "json" in endings:
        label = label_in_json(blocks, endings["json"], task)
    if label is None:
        name, noun = printable(key), "label" if task == "classify" else LABEL_FIELDS[task][0]
        places = f"{name}.cls, or label in" if task == "classify" else f"{noun} to"
        raise ShardError(f"has no {noun} for {name}. Add {places} {name}.json")
    return images[0], label
