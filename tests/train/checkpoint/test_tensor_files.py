"""A damaged or hostile checkpoint is refused in one line, runs nothing and wastes no memory."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import random
import socket
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from tests.conftest import LAUNCH_LIMIT_S, PYTHON
from tests.factories import HostilePickle
from tests.train.checkpoint.saved import SETTINGS, save
from train.checkpoint.metadata import CHECKSUM_FILE, METADATA_FILE, CorruptCheckpoint
from train.checkpoint.resume import load
from train.checkpoint.tensor_files import CheckpointReader, os_error_of, write_tensors

DAMAGES = int(os.environ.get("CHECKPOINT_DAMAGES", "1000"))


def damage(kind: int, data: bytearray, draw: random.Random, others: list[bytes]) -> None:
    """Change a file's content in place: a bit, its end, an inserted or zeroed part, or a part of another file."""
    if kind == 0:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    elif kind == 1:
        del data[draw.randrange(len(data)) :]
    elif kind == 2:
        data += draw.randbytes(draw.randint(1, 200))
    elif kind == 3:
        start = draw.randrange(len(data))
        data[start : start + draw.randint(1, 64)] = draw.randbytes(draw.randint(0, 64))
    elif kind == 4:
        start, count = draw.randrange(len(data)), draw.randint(1, 4096)
        data[start : start + count] = bytes(len(data[start : start + count]))
    else:
        data[:] = draw.choice(others)


@pytest.mark.parametrize(("folder_mode", "file_mode"), [(0o755, 0o644), (0o775, 0o664), (0o700, 0o600)])
def test_written_file_has_tensors_and_mode_of_its_folder(tmp_path: Path, folder_mode: int, file_mode: int) -> None:
    tensors = {
        "column-major": torch.arange(6.0).reshape(2, 3).T,
        "scalar": torch.tensor(3),
        "half": torch.full((2,), 0.5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 4),
    }
    tmp_path.chmod(folder_mode)
    path = tmp_path / "model.safetensors"
    assert write_tensors(path, tensors) == hashlib.sha256(path.read_bytes()).hexdigest()
    found = load_file(path)
    assert set(found) == set(tensors)
    assert all(torch.equal(found[name], value) and found[name].dtype == value.dtype for name, value in tensors.items())
    assert path.stat().st_mode & 0o777 == file_mode
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_unwritable_file_raises_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="No such file or directory"):
        write_tensors(tmp_path / "gone/model.safetensors", {"w": torch.zeros(1)})


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("Error while serializing: I/O error: No space left on device (os error 28)", errno.ENOSPC),
        ('I/O error: Permission denied (os error 13) at path "/runs/.tmpX"', errno.EACCES),
        ("Error while serializing: header too large", None),
    ],
)
def test_library_error_becomes_os_error(text: str, number: int | None) -> None:
    found = os_error_of(SafetensorError(text))
    assert (found.errno if found else None) == number


@pytest.mark.seconds
def test_any_damage_is_found(tmp_path: Path) -> None:
    path, draw = save(tmp_path, 7), random.Random(0)
    contents = {file: file.read_bytes() for file in sorted(path.iterdir())}
    found = 0
    for number in range(DAMAGES):
        file = draw.choice(list(contents))
        data = bytearray(contents[file])
        damage(number % 6, data, draw, [one for other, one in contents.items() if other != file])
        if data == contents[file]:
            continue
        file.write_bytes(data)
        with pytest.raises(CorruptCheckpoint, match="cannot be read as a checkpoint"):
            load(path, SETTINGS)
        file.write_bytes(contents[file])
        found += 1
    assert found > 0.9 * DAMAGES
    assert load(path, SETTINGS).step == 7


def replace_by_socket(file: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(file))


REPLACEMENTS: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "socket": replace_by_socket,
    "link loop": lambda file: file.symlink_to(file),
    "folder": Path.mkdir,
    "endless device": lambda file: file.symlink_to("/dev/zero"),
    "nothing": lambda _: None,
}


@pytest.mark.parametrize("name", [CHECKSUM_FILE, METADATA_FILE, "model.safetensors"])
@pytest.mark.parametrize("kind", REPLACEMENTS)
def test_what_is_no_file_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = save(tmp_path, 7)
    (path / name).unlink()
    REPLACEMENTS[kind](path / name)
    with pytest.raises(CorruptCheckpoint) as error:
        load(path, SETTINGS)
    assert len(str(error.value).splitlines()) == 1


def seal(path: Path) -> None:
    """Write the checksums again, as anyone who changed the files could."""
    names = [file.name for file in path.iterdir() if file.name != CHECKSUM_FILE]
    lines = [f"{hashlib.sha256((path / name).read_bytes()).hexdigest()}  {name}\n" for name in sorted(names)]
    (path / CHECKSUM_FILE).write_text("".join(lines))


@pytest.mark.parametrize("name", ["model.safetensors", METADATA_FILE])
def test_pickles_run_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    path = save(tmp_path, 7)
    torch.save({"w": HostilePickle()}, tmp_path / "hostile.pt")
    for content in (pickle.dumps(HostilePickle()), (tmp_path / "hostile.pt").read_bytes()):
        (path / name).write_bytes(content)
        seal(path)
        with pytest.raises(CorruptCheckpoint):
            load(path, SETTINGS)
    assert not (tmp_path / "hostile-was-here").exists()


def change(**values: Any) -> Callable[[dict[str, Any]], None]:
    """Return what sets values of the metadata; a name may be a path with dots."""

    def apply(metadata: dict[str, Any]) -> None:
        for name, value in values.items():
            at = metadata
            *folders, last = name.split("__")
            for folder in folders:
                at = at[folder]
            at[last] = value

    return apply


PART = {"file": "model.safetensors", "key": "w", "start": 0}


@pytest.mark.parametrize(
    "hostile",
    [
        change(format=1),
        change(format=3),
        change(epoch=-1),
        change(step="7"),
        change(step=1e300),
        change(losses=["x"]),
        change(best=float(10**300)),
        change(settings=[]),
        change(scaler={"scale": 0, "growth_tracker": 1}),
        change(tensors={"code": {}}),
        change(tensors={}),
        change(tensors__model__w={"shape": [3, 2], "parts": []}),
        change(tensors__model__w={"shape": [3, 2], "parts": [{**PART, "file": "../../etc/passwd"}]}),
        change(tensors__model__w={"shape": [3, 2], "parts": [{**PART, "file": "/etc/passwd"}]}),
        change(tensors__model__w={"shape": [3, 2], "parts": [{**PART, "key": "none"}]}),
        change(tensors__model__w={"shape": [3, 2], "parts": [{**PART, "start": 2}]}),
        change(tensors__model__w={"shape": [3, 2], "parts": [PART, PART]}),
        change(tensors__model__w={"shape": [10**12, 2], "parts": [PART]}),
        change(tensors__model__w={"shape": [3, 10**12], "parts": [PART]}),
        change(tensors__model__w={"shape": [], "parts": [PART]}),
        change(tensors__model__w={"shape": [-3, 2], "parts": [PART]}),
        change(tensors__model__count={"shape": [5], "parts": [{**PART, "key": "count"}]}),
    ],
)
def test_hostile_metadata_is_refused(tmp_path: Path, hostile: Callable[[dict[str, Any]], None]) -> None:
    path = save(tmp_path, 7)
    metadata = json.loads((path / METADATA_FILE).read_text())
    hostile(metadata)
    (path / METADATA_FILE).write_text(json.dumps(metadata))
    seal(path)
    with pytest.raises(CorruptCheckpoint) as error:
        load(path, SETTINGS)
    assert len(str(error.value).splitlines()) == 1


def test_deeply_nested_json_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 7)
    (path / METADATA_FILE).write_text("[" * 200_000)
    seal(path)
    with pytest.raises(CorruptCheckpoint):
        load(path, SETTINGS)


@pytest.mark.parametrize(
    "header",
    [
        {"w": {"dtype": "F64", "shape": [3, 2], "data_offsets": [0, 24]}},
        {"w": {"dtype": "F32", "shape": [3, 2**62], "data_offsets": [0, 24]}},
        {"w": {"dtype": "X9", "shape": [3, 2], "data_offsets": [0, 24]}},
        {"w": {"dtype": "F32", "shape": [3, 2], "data_offsets": [0, 2**60]}},
        {"w": {"dtype": "F32", "shape": [3, 2], "data_offsets": [24, 0]}},
        {"w": []},
        [],
    ],
)
def test_hostile_safetensors_header_is_refused(tmp_path: Path, header: object) -> None:
    path = save(tmp_path, 7)
    text = json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(24))
    seal(path)
    with pytest.raises(CorruptCheckpoint) as error:
        load(path, SETTINGS)
    assert len(str(error.value).splitlines()) == 1


def test_additional_files_in_the_folder_are_ignored(tmp_path: Path) -> None:
    path = save(tmp_path, 7)
    (path / "notes.txt").write_text("mine")
    assert load(path, SETTINGS).step == 7


def test_rows_of_a_tensor_can_be_read_alone(tmp_path: Path) -> None:
    reader = CheckpointReader(save(tmp_path, 7))
    ((name, rows, value),) = reader.parts({"model/w": range(1, 3)})
    assert (name, rows, value.tolist()) == ("model/w", slice(0, 2), [[7.0, 7.0]] * 2)


# The working folder is below the mount; the same path leads to what is mounted over it.
UNDER_A_MOUNT = """
    import sys
    from pathlib import Path

    import torch

    from train.checkpoint.tensor_files import write_tensors

    print(write_tensors(Path(sys.argv[1]), {"weight": torch.ones(4)}))
"""


@pytest.mark.launch
def test_tensors_are_written_where_a_mount_lies_over_the_folder(tmp_path: Path) -> None:
    mount = 'cd "$0" && mount --bind "$0" "$0" && exec "$@"'
    command = ("unshare", "--mount", "bash", "-c", mount, tmp_path, PYTHON, "-c", textwrap.dedent(UNDER_A_MOUNT), "x")
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LAUNCH_LIMIT_S)
    if "unshare" in result.stderr or "mount:" in result.stderr:
        pytest.skip(f"needs the right to mount: {result.stderr.strip()}")
    assert result.stdout.strip() == hashlib.sha256((tmp_path / "x").read_bytes()).hexdigest(), result.stderr


def test_views_of_one_buffer_are_stored_each_on_its_own(tmp_path: Path) -> None:
    whole = torch.arange(10.0)
    write_tensors(tmp_path / "x.safetensors", {"all": whole, "part": whole[2:5]})
    assert {name: value.tolist() for name, value in load_file(tmp_path / "x.safetensors").items()} == {
        "all": whole.tolist(),
        "part": [2.0, 3.0, 4.0],
    }
