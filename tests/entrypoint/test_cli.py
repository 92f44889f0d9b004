"""The command line taken apart: flags of ours before a script, everything after it the script's own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from entrypoint.cli import help_text, parse
from entrypoint.errors import Refused
from entrypoint.settings import LaunchSettings
from entrypoint.variables import variable_name
from train.settings import TrainSettings


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").write_text("")
    return "x.py"


def test_flags_after_the_script_are_the_scripts(script: str) -> None:
    request = parse(["run", "--threads", "2", script, "--threads", "9", "--dry-run"], TrainSettings)
    assert request.launch_flags == {"threads": "2"}
    assert request.program is not None
    assert request.program.argv == (sys.executable, script, "--threads", "9", "--dry-run")
    assert request.starts


def test_a_module_is_run_as_python_does() -> None:
    request = parse(["run", "-m", "pkg.tool", "-v"], TrainSettings)
    assert request.program is not None
    assert request.program.argv == (sys.executable, "-m", "pkg.tool", "-v")


@pytest.mark.parametrize(
    ("argv", "launch", "train"),
    [
        (["train", "--epochs=3", "--nproc-per-node", "2"], {"nproc_per_node": "2"}, {"epochs": "3"}),
        (["train", "--oversubscribe", "--bias", "0"], {"oversubscribe": "1"}, {"bias": "0"}),
        (["plan", "--epochs", "3", "train", "--threads", "1"], {"threads": "1"}, {"epochs": "3"}),
        (["plan"], {}, {}),
    ],
)
def test_flags_are_the_settings_names(argv: list[str], launch: dict[str, str], train: dict[str, str]) -> None:
    request = parse(argv, TrainSettings)
    assert (request.launch_flags, request.train_flags) == (launch, train)
    assert request.program is None


def test_plan_of_a_script_starts_nothing(script: str) -> None:
    assert not parse(["plan", "run", script], TrainSettings).starts
    assert not parse(["run", "--dry-run", script], TrainSettings).starts
    assert not parse(["train", "--json"], TrainSettings).starts


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["trian"], "trian: no such command. Did you mean train?"),
        (["train", "--epoch", "3"], "--epoch: no such flag. Did you mean --epochs?"),
        (["train", "--epochs"], "--epochs: needs a value"),
        (["train", "x.py"], "x.py: unexpected; `entrypoint run x.py`"),
        (["run"], "run: no script"),
        (["run", "-m"], "run -m: no module"),
        (["run", "nowhere.py"], "nowhere.py: no such script"),
        (["plan", "--epochs", "3", "run", "x.py"], "--epochs: a trainer's flag"),
    ],
)
def test_what_cannot_be_understood_is_refused(argv: list[str], said: str) -> None:
    with pytest.raises(Refused) as error:
        parse(argv, TrainSettings)
    assert str(error.value).startswith(said)


def test_help_names_every_setting() -> None:
    text = help_text()
    for prefix, model in (("LAUNCH_", LaunchSettings), ("TRAIN_", TrainSettings)):
        assert all(variable_name(prefix, field) in text for field in model.model_fields)
