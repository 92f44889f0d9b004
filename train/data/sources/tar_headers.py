"""What a tar shard says of its images: where each one is, and its label, by its headers alone."""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from entrypoint.core.errors import UserError, first_line, one_line, printable
from entrypoint.core.paths import open_regular
from train.data.sources.image_file import BLOCK, Shard
from train.setting_groups.folder_kind import IMAGE_ENDINGS

LABEL_FIELDS = ("cls", "label")
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


class ShardError(Exception):
    """Raised with the problem of a shard, and what to do."""


class ImageRange(NamedTuple):
    """A shard's image, as `TarMember` has it."""

    start: int
    size: int


@dataclass
class Sample:
    """The members with the same key: images by ending, and what holds the label."""

    images: dict[str, ImageRange] = field(default_factory=dict)
    label: int | None = None
    json: tarfile.TarInfo | None = None
    endings: list[str] = field(default_factory=list)


def read_shard(path: Path) -> tuple[Shard, list[tuple[ImageRange, int]]]:
    """Return a shard, and its images in order with their labels.

    Raises `UserError`, and `OSError` for a file that cannot be read.
    """
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            status = os.fstat(file.fileno())
            shard = Shard(path, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            return shard, read_images(file, shard.size)
    except ShardError as error:
        raise UserError(f"{one_line(path)} {error}.") from None
    except OSError as error:
        error.filename = error.filename or str(path)  # the disk fails while it is read
        raise


def read_images(file: BinaryIO, size: int) -> list[tuple[ImageRange, int]]:
    """Return the images of a shard of so many bytes in order, with their labels; raises `ShardError`."""
    start = file.read(max(map(len, COMPRESSED)))
    for magic, name in COMPRESSED.items():
        if start.startswith(magic):
            raise ShardError(f"is compressed by {name}, {NO_RANDOM_READ}")
    if not start:
        raise ShardError("is an empty file. Remove it, or copy it again")
    samples: dict[str, Sample] = {}
    for key, ending, member in read_members(file, size):
        add_member(samples.setdefault(key, Sample()), ending, member, file)
    if not samples:
        raise ShardError("holds no images. Remove it, or pack some as KEY.jpg with KEY.cls")
    return [image_of(key, sample, file) for key, sample in samples.items()]


COPY_AGAIN = "Copy or pack it again"
NO_RANDOM_READ = "so no image can be read by itself. Decompress it to a .tar"


def read_members(file: BinaryIO, size: int) -> Iterator[tuple[str, str, tarfile.TarInfo]]:
    """Yield key, ending and header of each regular member that is part of a sample; raises `ShardError`.

    Links, folders, hidden files and names without an ending are passed over, and so is what webdataset calls metadata.
    """
    file.seek(0)
    try:
        with tarfile.open(fileobj=file, mode="r:", encoding="utf-8", errors="surrogateescape") as archive:
            while (member := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # tarfile keeps them all
                if member.size < 0:
                    raise ShardError(f"has a damaged header at byte {member.offset:,}. {COPY_AGAIN}")
                if (missing := member.offset_data + member.size - size) > 0:
                    raise ShardError(f"is cut short: {printable(member.name)} lacks {missing:,} bytes. {COPY_AGAIN}")
                if member.issparse():
                    raise ShardError(f"has {printable(member.name)} as a sparse file. Pack it without --sparse")
                found = NAME.fullmatch(member.name)
                if member.isreg() and found and not METADATA.fullmatch(member.name):
                    yield found[1], found[2].lower(), member
            check_end(file, archive.offset)
    except (ShardError, OSError):
        raise
    except Exception as error:  # tarfile raises what its parser meets: TarError, ValueError, RecursionError
        reason = first_line(error) or type(error).__name__
        raise ShardError(f"is no whole tar file ({printable(reason)}). {COPY_AGAIN}") from None


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


def add_member(sample: Sample, ending: str, member: tarfile.TarInfo, file: BinaryIO) -> None:
    """Add a member to its sample; raises `ShardError` for a second one of that ending, and for a wrong label."""
    name = printable(member.name)
    if ending in sample.endings:
        raise ShardError(f"has {name} twice. Give each sample a key of its own")
    sample.endings.append(ending)
    if ending.rpartition(".")[2] in IMAGE_ENDINGS:
        headers = (member.offset_data - member.offset) // BLOCK
        sample.images[ending] = ImageRange(member.offset_data + (headers if headers < BLOCK else 0), member.size)
    elif ending == "cls":
        content = read_text(file, member, MAX_CLS_BYTES)
        found = LABEL.fullmatch(content)
        if not found:
            raise ShardError(f"has '{printable(content.decode(errors='replace'))}' in {name}. {WHOLE_NUMBER}")
        sample.label = int(found[1])
    elif ending == "json":
        sample.json = member


WHOLE_NUMBER = "A label is a whole number from 0 on"


def read_text(file: BinaryIO, member: tarfile.TarInfo, limit: int) -> bytes:
    """Return the content of a small member; raises `ShardError` for a large one."""
    if member.size > limit:
        raise ShardError(f"has {member.size:,} bytes in {printable(member.name)}, too many for a label. Pack it again")
    file.seek(member.offset_data)
    return file.read(member.size)


def label_in_json(file: BinaryIO, member: tarfile.TarInfo) -> int | None:
    """Return the label that a JSON member holds, None if it has none; raises `ShardError` for one of another kind."""
    name, content = printable(member.name), read_text(file, member, MAX_JSON_BYTES)
    try:
        fields = msgspec.json.decode(content, type=dict[str, object])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        raise ShardError(f"has no JSON object in {name}. Correct it, and pack it again") from None
    for field_name in LABEL_FIELDS:
        if field_name in fields:
            label = fields[field_name]
            if type(label) is not int or not 0 <= label <= MAX_LABEL:
                raise ShardError(f"has {field_name} {printable(label)} in {name}. {WHOLE_NUMBER}")
            return label
    return None


def image_of(key: str, sample: Sample, file: BinaryIO) -> tuple[ImageRange, int]:
    """Return the image of a sample and its label, by its JSON only if it has no cls.

    Raises `ShardError` for a sample without an image or with several, and for one without a label.
    """
    name = printable(key)
    plain = [one for ending, one in sample.images.items() if "." not in ending]
    images = plain or list(sample.images.values())
    if not images:
        raise ShardError(f"has no image for {name}, only {', '.join(map(printable, sample.endings))}. Add or remove it")
    if len(images) > 1:
        raise ShardError(f"has {len(images)} images for {name}. Give each image a key of its own")
    label = sample.label
    if label is None and sample.json:
        label = label_in_json(file, sample.json)
    if label is None:
        raise ShardError(f"has no label for {name}. Add {name}.cls, or label in {name}.json")
    return images[0], label
