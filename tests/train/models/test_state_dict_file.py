"""A file of weights is read, no matter who made it, and nothing in it runs."""

from __future__ import annotations

import argparse
import collections
import json
import pickle
import random
import shlex
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from entrypoint.core.errors import UserError
from tests.conftest import refusal
from train.models.state_dict_file import read_state_dict
from train.models.weights_origin import find_weights_file

TENSORS = {
    "conv.weight": torch.randn(4, 3, 2, 2),
    "conv.bias": torch.randn(4).to(torch.float16),
    "turned": torch.arange(6.0).view(2, 3).t(),
    "count": torch.tensor(7),
    "flags": torch.tensor([True, False]),
    "low": torch.randn(3).to(torch.bfloat16),
    "empty": torch.empty(0, 5),
}
EVIL = b"cposix\nsystem\n(S'touch evil-was-here'\ntR."


def equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        found[name].dtype == one.dtype and torch.equal(found[name], one) for name, one in wanted.items()
    )


WRAPPED: dict[str, Any] = {
    "bare": TENSORS,
    "ordered": collections.OrderedDict(TENSORS),
    "state_dict": {"state_dict": TENSORS, "epoch": 3, "arch": "resnet18"},
    "model": {"model": TENSORS, "optimizer": {"state": {0: {"step": torch.tensor(1.0)}}}},
    "model_ema": {"model": {"other": torch.zeros(1)}, "model_ema": TENSORS},
    "program arguments": {"state_dict": TENSORS, "args": argparse.Namespace(lr=0.1, data=Path("/data"))},
    "module prefix": {f"module.{name}": one for name, one in TENSORS.items()},
    "average": {"n_averaged": torch.tensor(3)} | {f"module.{name}": one for name, one in TENSORS.items()},
    "compiled": {f"module._orig_mod.{name}": one for name, one in TENSORS.items()},
    "parameters": {name: nn.Parameter(one, requires_grad=one.is_floating_point()) for name, one in TENSORS.items()},
}


@pytest.mark.parametrize("kind", WRAPPED)
@pytest.mark.parametrize("legacy", [False, True])
def test_state_dict_of_torch_save_is_read(tmp_path: Path, kind: str, legacy: bool) -> None:
    torch.save(WRAPPED[kind], tmp_path / "a.pth", _use_new_zipfile_serialization=not legacy)
    assert equal(read_state_dict(tmp_path / "a.pth"), TENSORS)


def test_state_dict_of_a_module_with_versions_is_read(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    torch.save(module.state_dict(), tmp_path / "a.pth")
    assert equal(read_state_dict(tmp_path / "a.pth"), dict(module.state_dict()))


def test_safetensors_file_is_read(tmp_path: Path) -> None:
    save_file({name: one.contiguous() for name, one in TENSORS.items()}, tmp_path / "a.safetensors")
    assert equal(read_state_dict(tmp_path / "a.safetensors"), TENSORS)


def rewritten(path: Path, target: Path, change: dict[str, bytes], *, compress: bool = False) -> Path:
    """Copy a zip file with other contents of some of its entries."""
    kind = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(target, "w", kind) as new:
        for name in old.namelist():
            new.writestr(name, change.get(name.split("/", 1)[1], old.read(name)))
    return target


def hostile_files(folder: Path) -> dict[str, Path]:
    """Return files that are no state dict, or a bad one."""
    good = folder / "good.pth"
    torch.save(TENSORS, good)
    entries = {
        "text": b"hello", "nothing": b"", "code": EVIL, "zip of code": b"", "cut": good.read_bytes()[:-300],
        "list": pickle.dumps([1, 2]), "header": b"\xff" * 8 + b"{}", "short header": (99).to_bytes(8, "little") + b"{",
    }  # fmt: skip
    found = {}
    for name, content in entries.items():
        found[name] = folder / f"{name}.pth"
        found[name].write_bytes(content)
    rewritten(good, found["zip of code"], {"data.pkl": EVIL})
    found["compressed"] = rewritten(good, folder / "compressed.pth", {}, compress=True)
    found["big endian"] = rewritten(good, folder / "endian.pth", {"byteorder": b"big"})
    found["short values"] = rewritten(good, folder / "short.pth", {"data/0": b"1234"})
    torch.save([TENSORS["count"]], folder / "list.pth")
    found["no names"] = folder / "list.pth"
    torch.save({"epoch": 3}, folder / "epoch.pth")
    found["no tensors"] = folder / "epoch.pth"
    found["missing"] = folder / "nobody.pth"
    return found


def test_hostile_file_is_one_line_and_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in hostile_files(tmp_path).values():
        refusal(read_state_dict, path, match=r"^TRAIN_WEIGHTS=.*cannot be read as weights \(.+\)\. ")
    assert not (tmp_path / "evil-was-here").exists()


def write_shards(folder: Path, names: tuple[str, str]) -> Path:
    """Write the tensors in two files and an index of them."""
    places = {name: names[index % 2] for index, name in enumerate(TENSORS)}
    for file in names:
        part = {name: TENSORS[name].contiguous() for name, place in places.items() if place == file}
        save_file(part, folder / Path(file).name)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 9}, "weight_map": places}))
    return index


def test_weights_in_several_files_are_read(tmp_path: Path) -> None:
    index = write_shards(tmp_path, ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"))
    assert find_weights_file(str(tmp_path)) == index
    assert equal(read_state_dict(index), TENSORS)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    refusal(read_state_dict, index, match=r"index\.json: names model-00002-of-00002\.safetensors, which is not in its")


@pytest.mark.parametrize("name", ["../b.safetensors", "/b.safetensors", "a/../../b.safetensors"])
def test_index_that_leaves_its_folder_is_refused(tmp_path: Path, name: str) -> None:
    index = write_shards(tmp_path, ("a.safetensors", name))
    refusal(read_state_dict, index, match=r"names .*b\.safetensors, which is not in its folder")


@pytest.mark.parametrize("content", ["", "[]", "{", "{}", '{"weight_map": 3}', '{"weight_map": {"a": null}}'])
def test_index_that_is_none_is_one_line(tmp_path: Path, content: str) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(content)
    refusal(read_state_dict, index, match="cannot be read as weights")


@pytest.mark.launch
@pytest.mark.parametrize(("key", "legacy"), [("", False), ("ema", True)])
def test_whole_model_is_one_line_with_a_command_that_converts_it(tmp_path: Path, key: str, legacy: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    path = tmp_path / "my model.pt"
    held = {key: model, "epoch": 3} if key else model
    with warnings.catch_warnings(action="ignore"):  # the source of a class that torch itself defines
        torch.save(held, path, _use_new_zipfile_serialization=not legacy)
    line = refusal(read_state_dict, path, match="holds a whole model, and reading it would run its code")
    program, *arguments = shlex.split(line.split("`")[1])
    assert program == "python"
    subprocess.run([sys.executable, *arguments], check=True)
    assert equal(read_state_dict(tmp_path / "my model-weights.pth"), dict(model.state_dict()))


def test_weights_next_to_a_whole_model_are_read(tmp_path: Path) -> None:
    torch.save({"model": nn.Linear(2, 2), "state_dict": TENSORS}, tmp_path / "a.pth")
    assert equal(read_state_dict(tmp_path / "a.pth"), TENSORS)


@pytest.mark.parametrize(
    ("offset", "shape", "stride"),
    [
        (0, (1 << 40,), (1,)), (5, (2,), (1,)), (0, (2, 2), (1,)), (-1, (1,), (1,)), (0, (3,), (-1,)),
        (0, (2,), (1 << 62,)), ("0", (1,), (1,)), (0, [1], [1]), (0, (1,) * 40, (1,) * 40), (6, (), ()),
        (0, (1 << 30,), (0,)), (0, (7,), (0,)),
    ],
)  # fmt: skip
def test_tensor_outside_of_its_values_is_refused(offset: object, shape: object, stride: object) -> None:
    from train.models.state_dict_file import StorageRef, rebuild_tensor

    with pytest.raises(ValueError, match="tensor is"):
        rebuild_tensor(StorageRef("0", torch.float32, 6), offset, shape, stride)


def test_random_damage_is_an_error_or_the_same_kind_of_result(tmp_path: Path) -> None:
    torch.save(WRAPPED["program arguments"], tmp_path / "a.pth")
    content, chance = (tmp_path / "a.pth").read_bytes(), random.Random(0)
    refused = 0
    for _ in range(400):
        damaged = bytearray(content)
        for _ in range(chance.randint(1, 8)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        (tmp_path / "b.pth").write_bytes(damaged)
        try:
            found = read_state_dict(tmp_path / "b.pth")
        except UserError:
            refused += 1
        else:
            assert all(isinstance(one, Tensor) for one in found.values())
    assert refused > 40
