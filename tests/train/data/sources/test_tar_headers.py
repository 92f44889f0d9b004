"""The images of a tar shard are found by its headers, and a shard with a fault is named."""

from __future__ import annotations

import bz2
import gzip
import lzma
import subprocess
import tarfile
from contextlib import suppress
from io import BytesIO
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from entrypoint.core.errors import UserError
from tests.conftest import FUZZ_EXAMPLES, refusal
from tests.train.data.shard_files import Member, image_bytes, samples, write_tar
from train.data.sources.image_file import read_member
from train.data.sources.tar_headers import Blocks, ShardError, read_members, read_shard

JPEG = image_bytes()
LONG = "folder of photos/" * 12 + "ä photo"


def contents(path: Path) -> list[tuple[str, bytes, int]]:
    """Return name, bytes and label of each image of a shard."""
    files, labels = read_shard(path)
    return [(file.name, read_member(file), label) for file, label in zip(files, labels, strict=True)]


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_images_are_ranges_of_the_file(tmp_path: Path, kind: int) -> None:
    path = write_tar(tmp_path / "a.tar", samples([3, 1, 2]), kind)
    assert contents(path) == [(f"00000{row}.jpg", image_bytes(row), label) for row, label in enumerate([3, 1, 2])]


@pytest.mark.parametrize("kind", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("key", [LONG, "./a", "a/b.c/d", "sample \N{PILE OF POO}", "line\nbreak"])
def test_long_and_odd_names_are_read(tmp_path: Path, key: str, kind: int) -> None:
    path = write_tar(tmp_path / "a.tar", [(f"{key}.jpg", JPEG), (f"{key}.cls", b"7")], kind)
    assert contents(path) == [(f"{key}.jpg", JPEG, 7)]


def test_member_without_a_name_says_where_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in (("a.jpg", JPEG), ("a.cls", b"7")):
            header = tarfile.TarInfo(name)
            header.size, header.pax_headers = len(content), {"comment": "c" * 300_000}
            archive.addfile(header, BytesIO(content))
    ((name, content, label),) = contents(path)
    assert (name, content, label) == (f"byte {301_056:,}", JPEG, 7)
    (file,), _ = read_shard(write_tar(path, samples([1])))
    path.write_bytes(path.read_bytes()[:-512])
    assert str(file) == f"{path}:byte 512"


def test_tar_command_makes_shards(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name, content in [*samples([1, 0]), ("\udcff.jpg", JPEG), ("\udcff.cls", b"1")]:
        (folder / name).write_bytes(content)
    subprocess.run(["tar", "--sort=name", "-cf", tmp_path / "a.tar", "-C", folder, "."], check=True)
    assert [(name, label) for name, _, label in contents(tmp_path / "a.tar")] == [
        ("./000000.jpg", 1), ("./000001.jpg", 0), ("./\udcff.jpg", 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("members", "label"),
    [
        ([("a.JPG", JPEG), ("a.CLS", b" 4\n")], 4),
        ([("a.json", b'{"label": 4, "other": ["x"]}'), ("a.jpg", JPEG)], 4),
        ([("a.json", b'{"label": 5, "cls": 4}'), ("a.jpg", JPEG)], 4),
        ([("a.json", b'{"label": 5}'), ("a.jpg", JPEG), ("a.cls", b"4")], 4),
        ([("a.jpg", JPEG), ("a.cls", b"4"), ("a.txt", b"a caption"), ("a.seg.png", b"")], 4),
        ([("a.input.jpg", JPEG), ("a.cls", b"4")], 4),
        ([("a.jpg", JPEG), ("a.json", b'{"label": "dog"}'), ("a.cls", b"4")], 4),
        ([("a.jpg", JPEG), ("a.json", b"no JSON"), ("a.cls", b"4")], 4),
        ([("a.jpg", JPEG), ("a.cls", b"4"), (".hidden.jpg", b""), ("README", b""), ("__meta.json__", b"")], 4),
        ([("a.jpg", JPEG), ("d/._a.jpg", b""), ("a.cls", b"4")], 4),
    ],
)
def test_label_is_in_cls_or_json(tmp_path: Path, members: list[Member], label: int) -> None:
    ((_, content, found),) = contents(write_tar(tmp_path / "a.tar", members))
    assert (content, found) == (JPEG, label)


@pytest.mark.parametrize(
    ("task", "content", "label"),
    [
        ("multilabel", b'{"labels": ["ant", "bee"]}', ("ant", "bee")),
        ("multilabel", b'{"label": "ant", "x": 1}', ("ant",)),
        ("multilabel", b'{"labels": []}', ()),
        ("multilabel", b'{"labels": [1, 0.0, true]}', (1.0, 0.0, 1.0)),
        ("regress", b'{"target": 3}', (3.0,)),
        ("regress", b'{"label": [1.5, -2e3], "labels": "x"}', (1.5, -2000.0)),
        ("classify", b'{"labels": ["ant", "bee"]}', "has labels ['ant', 'bee'] in a.json. A label is a whole number"),
        ("classify", b'{"label": [1]}', "from 0 on, or set TRAIN_TASK=multilabel"),
        ("multilabel", b'{"labels": [1, 2]}', "has labels [1, 2] in a.json. Labels are a list of names, or of 0 and 1"),
        ("multilabel", b'{"labels": ["ant", 1]}', "has labels ['ant', 1] in a.json"),
        ("multilabel", b'{"labels": null}', "has labels None in a.json"),
        ("multilabel", b'{"x": 1}', "has no labels for a. Add labels to a.json"),
        ("regress", b'{"target": []}', "has target [] in a.json. A target is a number, or a list of numbers"),
        ("regress", b'{"target": true}', "has target True in a.json"),
        ("regress", b'{"target": "3"}', "has target 3 in a.json"),
        ("regress", b'{"target": 1e31}', "has target 1e+31 in a.json"),
        ("regress", b'{"target": 1e400}', "has no JSON object in a.json"),
        ("regress", b'{"target": 1' + b"0" * 500 + b"}", "in a.json"),
    ],
)
def test_labels_of_other_tasks_are_in_json(tmp_path: Path, task: str, content: bytes, label: object) -> None:
    path = write_tar(
        tmp_path / "a.tar", [("a.jpg", JPEG), ("a.json", content), *([("a.cls", b"x")] * (task[0] != "c"))]
    )
    if isinstance(label, str):
        assert label in refusal(read_shard, path, task)
    else:
        assert read_shard(path, task)[1] == [label]


def test_members_of_a_sample_need_not_be_neighbors(tmp_path: Path) -> None:
    members = sorted(samples([2, 0, 1]), key=lambda member: member[0].endswith("cls"))
    found = contents(write_tar(tmp_path / "a.tar", members))
    assert [label for _, _, label in found] == [2, 0, 1]


def test_links_and_folders_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        for name, kind in (("a", tarfile.DIRTYPE), ("b.jpg", tarfile.SYMTYPE), ("c.jpg", tarfile.LNKTYPE)):
            header = tarfile.TarInfo(name)
            header.type, header.linkname = kind, "/etc/passwd"
            archive.addfile(header)
    refusal(read_shard, path, match="holds no images")


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ([("a.jpg", JPEG)], "has no label for a. Add a.cls, or label in a.json"),
        ([("a.jpg", JPEG), ("a.json", b'{"caption": "x"}')], "has no label for a"),
        ([("a.cls", b"1")], "has no image for a, only cls. Add or remove it"),
        ([("a.jpg", JPEG), ("a.cls", b"1"), ("notes.txt", b"")], "has no image for notes, only txt"),
        ([("a.jpg", JPEG), ("a.png", JPEG), ("a.cls", b"1")], "has 2 images for a"),
        ([("a.jpg", JPEG), ("a.jpg", JPEG), ("a.cls", b"1")], "has a.jpg twice"),
        ([("a.jpg", JPEG), ("a.cls", b"dog")], "has 'dog' in a.cls. A label is a whole number from 0 on"),
        ([("a.jpg", JPEG), ("a.cls", b"")], "has '' in a.cls"),
        ([("a.jpg", JPEG), ("a.cls", b"-1")], "has '-1' in a.cls"),
        ([("a.jpg", JPEG), ("a.cls", b"1" * 10)], "has '1111111111' in a.cls"),
        ([("a.jpg", JPEG), ("a.cls", b"\x1b[31m\xff")], "' in a.cls"),
        ([("a.jpg", JPEG), ("a.cls", b"1" * 100)], "has 100 bytes in a.cls, too many for a label"),
        ([("a.jpg", JPEG), ("a.json", b"{")], "has no JSON object in a.json"),
        ([("a.jpg", JPEG), ("a.json", b"[" * 100_000)], "has no JSON object in a.json"),
        ([("a.jpg", JPEG), ("a.json", b'{"label": true}')], "has label True in a.json"),
        ([("a.jpg", JPEG), ("a.json", b'{"cls": 1.5}')], "has cls 1.5 in a.json"),
        ([("\x1b[31m\n.jpg", JPEG)], r"has no label for \x1b[31m\n"),
        ([], "holds no images"),
    ],
)
def test_wrong_members_are_named(tmp_path: Path, members: list[Member], said: str) -> None:
    path = write_tar(tmp_path / "a.tar", members)
    message = refusal(read_shard, path)
    assert said in message
    assert message.startswith(f"{path} ")


def test_every_cut_is_noticed(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", samples([0, 1]))
    whole = path.read_bytes()
    end = len(whole.rstrip(b"\0")) // 512 * 512 + 512
    for size in (*range(0, end + 512, 64), 1, 511, 513, end + 511):
        path.write_bytes(whole[:size])
        refusal(read_shard, path, match=r"is cut short|is no whole tar file|is an empty file")
    path.write_bytes(whole[: end + 512])
    assert len(read_shard(path)[1]) == 2


def test_damaged_header_is_no_end(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", samples([0, 1]))
    data = bytearray(path.read_bytes())
    place = data.index(b"000001.jpg")
    data[place + 1] ^= 1
    path.write_bytes(data)
    refusal(read_shard, path, match=f"has a damaged header at byte {place:,}")


def test_hole_behind_the_end_is_not_read(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", samples([0]))
    with path.open("r+b") as file:
        file.truncate(1 << 40)  # reading it would take an hour
    read_shard(path)


def test_joined_shards_are_refused(tmp_path: Path) -> None:
    first, second = (write_tar(tmp_path / f"{name}.tar", samples([0])) for name in "ab")
    first.write_bytes(first.read_bytes() + second.read_bytes())
    refusal(read_shard, first, match="has files behind its end mark, as tar files joined by cat")


@pytest.mark.parametrize(
    ("compress", "name"),
    [
        (gzip.compress, "gzip"),
        (bz2.compress, "bzip2"),
        (lzma.compress, "xz"),
        (lambda data: b"\x28\xb5\x2f\xfd" + data, "zstd"),
    ],
)
def test_compressed_shard_is_refused(tmp_path: Path, compress: object, name: str) -> None:
    path = write_tar(tmp_path / "a.tar", samples([0]))
    assert callable(compress)
    path.write_bytes(compress(path.read_bytes()))
    refusal(read_shard, path, match=f"is compressed by {name}, so no image can be read by itself")


def with_size(data: bytes, size: bytes) -> bytes:
    """Return a tar whose first header has another size, and the checksum for it."""
    header = bytearray(data[:512])
    header[124:136], header[148:156] = size, b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + data[512:]


@pytest.mark.parametrize("size", [b"77777777777\0", b"\xff" * 12, b"\xff" * 10 + b"\xfe\x00", b"\x80" + b"\x7f" * 11])
@pytest.mark.parametrize("kind", [b"0", b"x", b"L", b"S"])
def test_impossible_sizes_end_in_one_line(tmp_path: Path, size: bytes, kind: bytes) -> None:
    path = write_tar(tmp_path / "a.tar", samples([0]))
    data = path.read_bytes()
    path.write_bytes(with_size(data[:156] + kind + data[157:], size))
    refusal(read_shard, path)


def test_damaged_bytes_never_crash(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", samples([0, 1]), tarfile.GNU_FORMAT)
    whole = path.read_bytes()
    for place in range(0, len(whole.rstrip(b"\0")) + 2048, 7):
        data = bytearray(whole)
        data[place] ^= 0x55
        path.write_bytes(data)
        try:
            _, images = read_shard(path)
        except UserError as error:
            assert str(error).isprintable()
        else:
            assert len(images) == 2


def listed(path: Path, *, plain: bool) -> object:
    """Return the members of a tar file, with tarfile alone unless `plain`, or what is wrong with it."""
    with path.open("rb") as file:
        blocks = Blocks(file)
        if not plain:
            blocks.plain_member = lambda *_: None  # type: ignore[method-assign]
        try:
            return list(read_members(blocks, path.stat().st_size))
        except ShardError as error:
            return str(error)


NAMES = st.one_of(
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=120),
    st.sampled_from(["a.jpg", "./a.cls", "b" * 95 + ".json", "d/" * 60 + "c.jpg", "a.", "a.b/", "\udcff.jpg"]),
)
TIMES = st.one_of(st.just(0), st.floats(0, 1e10), st.integers(-1, 1 << 40))
TAR_TYPES = st.sampled_from([tarfile.REGTYPE] * 6 + [tarfile.AREGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, b"7", b"g"])
MEMBERS = st.lists(st.tuples(NAMES, st.binary(max_size=1100), TIMES, TAR_TYPES, st.integers(0, 1 << 22)), max_size=6)
KINDS = st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
# Where a byte is changed, and by what; whether the header's checksum is made right again.
DAMAGE = st.lists(st.tuples(st.integers(0, 8000), st.integers(0, 255), st.booleans()), max_size=2)


@settings(max_examples=FUZZ_EXAMPLES)
@given(MEMBERS, KINDS, DAMAGE)
def test_plain_headers_are_read_as_tarfile_does(
    tmp_path_factory: pytest.TempPathFactory,
    members: list[tuple[str, bytes, float, bytes, int]],
    kind: int,
    damage: list[tuple[int, int, bool]],
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.tar"
    with tarfile.open(path, "w", format=kind, encoding="utf-8", errors="surrogateescape") as archive:
        for name, content, mtime, tar_type, user in members:
            header = tarfile.TarInfo(name)
            header.size, header.type, header.uid = len(content), tar_type, user
            header.mtime = mtime if kind == tarfile.PAX_FORMAT else max(0, int(mtime) % 8**11)
            with suppress(ValueError):  # too long for USTAR
                archive.addfile(header, BytesIO(content))
    data = bytearray(path.read_bytes())
    for place, value, is_sealed in damage:
        data[place % len(data)] ^= value
        start = place % len(data) // 512 * 512
        if is_sealed:
            data[start + 148 : start + 156] = b" " * 8
            data[start + 148 : start + 156] = b"%06o\0 " % sum(data[start : start + 512])
    path.write_bytes(data)
    assert listed(path, plain=True) == listed(path, plain=False)


def test_nearly_all_headers_are_plain(tmp_path: Path) -> None:
    for kind, mtime in ((tarfile.USTAR_FORMAT, 0), (tarfile.GNU_FORMAT, 1), (tarfile.PAX_FORMAT, 1_700_000_000.25)):
        path = write_tar(tmp_path / "a.tar", samples([3, 1, 2]), kind, mtime)
        with path.open("rb") as file:
            blocks = Blocks(file)
            headers = [member.headers for member in read_members(blocks, path.stat().st_size)]
            members = [blocks.plain_member(headers[row], path.stat().st_size) for row in range(6)]
        assert [member.name if member else "" for member in members] == [
            f"00000{row}.{ending}" for row in range(3) for ending in ("jpg", "cls")
        ]
