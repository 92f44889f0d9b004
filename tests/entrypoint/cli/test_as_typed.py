"""Messages name the flag that the user typed."""

from __future__ import annotations

import pytest

from entrypoint.cli.parser import as_typed, parse_command_line, typed_flags
from tests.conftest import Entrypoint

TYPED = {"TRAIN_EPOCHS=3": "--epochs=3", "TRAIN_MODEL=a.b": "--model=a.b"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("TRAIN_EPOCHS=3: too few.", "--epochs=3: too few."),
        ("with TRAIN_EPOCHS=3.", "with --epochs=3."),
        ("TRAIN_EPOCHS=30: too many.", "TRAIN_EPOCHS=30: too many."),
        ("TRAIN_EPOCHS=3.5: no number.", "TRAIN_EPOCHS=3.5: no number."),
        ("MY_TRAIN_EPOCHS=3", "MY_TRAIN_EPOCHS=3"),
        ("TRAIN_MODEL=a.b: no such model.", "--model=a.b: no such model."),
        ("TRAIN_MODEL=aXb", "TRAIN_MODEL=aXb"),
    ],
)
def test_message_has_what_was_typed(text: str, shown: str) -> None:
    assert as_typed(text, TYPED) == shown


def test_flags_of_all_groups_are_typed() -> None:
    command = parse_command_line(["plan", "--threads", "2", "--model=cnn"])
    assert typed_flags(command) == {"LAUNCH_THREADS=2": "--threads=2", "TRAIN_MODEL=cnn": "--model=cnn"}


@pytest.mark.launch
def test_error_and_plan_name_the_flag(entrypoint: Entrypoint) -> None:
    (entrypoint.folder / "run.toml").write_text('[launch]\nthreads = 1\n[train]\nmodel = "nosuch"\n')
    result = entrypoint("plan", "--config", "run.toml")
    assert result.error_lines == [
        "entrypoint: error: TRAIN_MODEL=nosuch: no such model. It is cnn, speednet or a torchvision classifier such as"
        " resnet18."
    ]
    plan = entrypoint.plan("--config", "run.toml", "--model", "cnn")
    settings = {one["key"]: one["setting"] for one in plan["decisions"]}
    assert (settings["threads"], settings["model"]) == ("LAUNCH_THREADS=1", "--model=cnn")
