"""What ranks send each other: any value that a run needs, and nothing that could run code."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from entrypoint.core.errors import ExitCode, UserError
from tests.conftest import Entrypoint, needs_two_cores
from tests.train.given import SMALL, TWO_RANKS
from train.checkpoint.metadata import DataFingerprint, Metadata
from train.checkpoint.resume import ResumePoint
from train.checkpoint.tensor_files import Checkpoint
from train.distributed.exchange import decode, encode


@dataclass(frozen=True)
class Sent:
    text: str
    value: float
    pixels: Tensor


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ([True, False], list[bool]),
        ({"a b.jpg", "ü.jpg"}, set[str]),
        ((Path("runs/one"), [Path("a"), Path("b")]), tuple[Path, list[Path]]),
        (None, dict[str, Any] | None),
        ({"TRAIN_LR": 0.1, "a list": [1, None, "x"]}, dict[str, Any] | None),
        (DataFingerprint(classes=("ant", "bee"), train_examples=3), DataFingerprint | None),
    ],
)
def test_a_value_comes_back_as_it_was(value: object, kind: Any) -> None:
    assert decode(encode(value), kind) == value


def test_tensors_errors_and_nan_come_back_too() -> None:
    sent = decode(encode([Sent("x", math.nan, torch.arange(6).reshape(2, 3))]), list[Sent])[0]
    assert math.isnan(sent.value)
    assert torch.equal(sent.pixels, torch.arange(6).reshape(2, 3))
    error = decode(encode((UserError("no space", ExitCode.MACHINE), None)), tuple[UserError | None, str | None])[0]
    assert (str(error), error.code) == ("no space", ExitCode.MACHINE)
    tied = torch.ones(3)
    start = ResumePoint(Path("c"), Checkpoint(Metadata(epoch=1, step=2), {"model": {"a": tied, "b": tied}}))
    assert torch.equal(decode(encode(start), ResumePoint).checkpoint.section("model")["b"], tied)


@given(st.binary(max_size=200))
def test_no_bytes_of_a_stranger_are_more_than_an_error(content: bytes) -> None:
    for data in (content, len(content).to_bytes(8, "little") + content, bytes(encode("x").numpy()) + content):
        try:
            decode(torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8), Sent)
        except UserError as error:
            assert error.code == ExitCode.RENDEZVOUS


# torch's collectives for objects all go through this function.
MODEL = """
import torch.distributed.distributed_c10d as c10d
from torch import nn

def refuse(*_, **__):
    raise AssertionError("a pickle was about to be sent")

c10d._object_to_tensor = c10d._tensor_to_object = refuse

def net(num_classes, **_):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, num_classes))
"""


RESUME = {"TRAIN_RESUME": "auto", "TRAIN_RESUME_ALLOW_CHANGED": "1"}


@pytest.mark.launch
@pytest.mark.versions
@needs_two_cores
@pytest.mark.parametrize("parallelism", ["ddp", "fsdp"])
def test_ranks_send_no_pickle_when_they_start_save_and_resume(entrypoint: Entrypoint, parallelism: str) -> None:
    (entrypoint.folder / "mine.py").write_text(MODEL)
    common = SMALL | TWO_RANKS | {"TRAIN_MODEL": "mine:net", "TRAIN_MODEL_PATH": "."}
    common |= {"TRAIN_PARALLELISM": parallelism}
    entrypoint.train(env=common | {"TRAIN_EPOCHS": "1", "TRAIN_RUN_NAME": "one"})
    entrypoint.train(env=common | {"TRAIN_EPOCHS": "2", "TRAIN_RUN_NAME": "one", **RESUME})
