"""The command line: the entrypoint's own flags before a script, which messages name as typed, and then the script's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from entrypoint.cli.parser import CommandLine, as_typed, parse_command_line, typed_flags
from entrypoint.core.settings_base import groups_of, variable_name
from entrypoint.settings import LaunchSettings
from entrypoint.tune.search import TuneSettings
from tests.conftest import Entrypoint, refusal
from train.settings import TrainSettings

COMMANDS = ("train", "run", "plan", "tune", "doctor", "verify", "selftest")


def parse(*argv: str) -> CommandLine:
    return parse_command_line(argv)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").write_text("")
    return "x.py"


def test_flags_after_script_belong_to_script(script: str) -> None:
    command = parse("run", "--threads", "2", script, "--threads", "9", "--dry-run", "--help")
    assert command.flags == {"LAUNCH_THREADS": "2"}
    assert command.program is not None
    assert command.program.argv == (sys.executable, script, "--threads", "9", "--dry-run", "--help")
    assert command.launches
    assert command.program_words == ("run", script, "--threads", "9", "--dry-run", "--help")


def test_module_runs_as_python_does() -> None:
    command = parse("run", "-m", "pkg.tool", "-v")
    assert command.program is not None
    assert command.program.argv == (sys.executable, "-m", "pkg.tool", "-v")


@pytest.mark.parametrize(
    ("argv", "flags"),
    [
        (["train", "--epochs=3", "--nproc-per-node", "2"], {"LAUNCH_NPROC_PER_NODE": "2", "TRAIN_EPOCHS": "3"}),
        (["train", "--oversubscribe", "--decay-norms", "0"], {"LAUNCH_OVERSUBSCRIBE": "1", "TRAIN_DECAY_NORMS": "0"}),
        (["plan", "--epochs", "3", "train", "--threads", "1"], {"LAUNCH_THREADS": "1", "TRAIN_EPOCHS": "3"}),
        (["train", "--threads=1", "--threads=2"], {"LAUNCH_THREADS": "2"}),
        (["plan"], {}),
    ],
)
def test_flags_are_names_of_settings(argv: list[str], flags: dict[str, str]) -> None:
    command = parse(*argv)
    assert command.flags == flags
    assert command.program is None


@pytest.mark.parametrize("name", ["oversubscribe", "quiet"])
def test_boolean_flag_does_not_take_the_script_as_value(script: str, name: str) -> None:
    command = parse("run", f"--{name}", script)
    assert command.flags == {f"LAUNCH_{name.upper()}": "1"}
    assert command.program_words == ("run", script)


def test_tune_takes_flags_before_the_program(script: str) -> None:
    command = parse("tune", "--minutes", "2", "--threads", "1", "run", "--quiet", script, "--minutes", "7")
    assert command.flags == {"TUNE_MINUTES": "2", "LAUNCH_THREADS": "1", "LAUNCH_QUIET": "1"}
    assert command.program_words == ("run", script, "--minutes", "7")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["trian"], "trian: no such command. Did you mean train?"),
        (["train", "--epoch", "3"], "--epoch: no such flag. Did you mean --epochs?"),
        (["train", "--epochs"], "--epochs: needs a value. See `entrypoint train --help`."),
        (["plan", "--json=1"], "--json: ignored explicit argument '1'"),
        (["train", "--json"], "--json: train does not take it."),
        (["plan", "--config=a", "--config", "b"], "--config: names two files."),
        (["train", "x.py"], "x.py: unexpected. Use `entrypoint run x.py`"),
        (["run"], "run: no script."),
        (["run", "-m"], "run -m: no module."),
        (["run", "nowhere.py"], "nowhere.py: no such script"),
        (["run", "python", "x.py"], "run python: it starts Python itself. Use `entrypoint run x.py …`."),
        (
            ["run", "torchrun", "--nproc-per-node=2", "x.py"],
            "run torchrun: the entrypoint starts the ranks itself. Use `entrypoint run --launcher torchrun x.py …`, or",
        ),
        (["run", "--epochs", "3", "x.py"], "--epochs: a flag of the trainer."),
        (["plan", "--epochs", "3", "run", "x.py"], "--epochs: a flag of the trainer."),
        (["run", "--network", "x.py"], "--network: run does not take it. Leave it out"),
        (["predict", "--dry-run", "run", "a.jpg"], "--dry-run: predict does not take it."),
        (["stacks", "--config", "x.toml"], "--config: stacks does not take it."),
        (["verify", "--threads", "1"], "--threads: no such flag."),
        (["stacks", "--threads", "1"], "--threads: no such flag."),
        (["selftest", "x"], "x: unexpected."),
        (["--epochs", "3", "tune"], "--epochs: flags follow the command. Use `entrypoint tune --epochs …`"),
        (["train", ".", "--data-dir", "x"], "--data-dir=. and --data-dir=x contradict: name one folder of data."),
        (["plan", "train", "--data-dir=x", "."], "--data-dir=. and --data-dir=x contradict: name one folder of data."),
        (["train", ".", "x"], "train x: no such folder. Name a folder of data."),
        (["train", "phtos"], "train phtos: no such folder."),
        (["train", ".", "--nope", "1"], "--nope: no such flag."),
    ],
)
def test_unknown_words_are_errors(argv: list[str], said: str) -> None:
    assert refusal(parse, *argv).startswith(said)


def test_help_all_names_every_setting() -> None:
    text = parse("--help-all").help_text
    for model in (LaunchSettings, TrainSettings, TuneSettings):
        assert all(variable_name(model.PREFIX, field) in text for field in groups_of(model))


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command_fits_100_columns(command: str) -> None:
    for flag in ("--help", "--help-all", "-h"):
        text = parse(command, flag).help_text
        assert text.startswith(f"usage: entrypoint {command}")
        assert max(map(len, text.splitlines())) <= 100


def test_train_help_shows_few_settings_and_help_all_shows_all() -> None:
    few, every = parse("train", "--help").help_text, parse("train", "--help-all").help_text
    assert "--epochs" in few
    assert "--mixup-alpha" not in few
    assert all(f"--{name.replace('_', '-')}" in every for name in groups_of(TrainSettings))
    assert "--epochs" not in parse("run", "--help-all").help_text


def test_version_and_overview_need_no_command() -> None:
    assert parse("--version").help_text.startswith("entrypoint 0.")
    for argv in ((), ("--help",), ("help",)):
        assert all(name in parse(*argv).help_text for name in COMMANDS)


def test_many_words_are_read_in_linear_time() -> None:
    words = [f"{number}.jpg" for number in range(200_000)]
    command = parse("predict", "runs/latest", *words, "--top", "3", words[0])
    assert command.flags == {"PREDICT_TOP": "3"}
    assert command.words == ("runs/latest", *words, words[0])


def test_switch_may_be_the_last_word_after_a_folder(tmp_path: Path) -> None:
    command = parse_command_line(["train", "--threads", "2", str(tmp_path), "--epochs", "3", "--quiet"])
    train = {"TRAIN_DATA_DIR": str(tmp_path), "TRAIN_EPOCHS": "3"}
    assert command.flags == {**train, "LAUNCH_THREADS": "2", "LAUNCH_QUIET": "1"}


@pytest.mark.parametrize(
    "words", [("run", "--"), ("run", "--threads=2", "--"), ("plan", "run", "--"), ("tune", "run", "--")]
)
def test_two_dashes_end_the_flags_before_a_script(script: str, words: tuple[str, ...]) -> None:
    command = parse(*words, script, "--", "-x")
    assert command.program is not None
    assert command.program.argv == (sys.executable, script, "--", "-x")


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
