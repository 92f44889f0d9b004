"""Settings from a TOML file."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from entrypoint.cli.command_table import all_groups
from entrypoint.cli.config_file import read_config, with_config
from entrypoint.core.settings_base import read_settings
from tests.conftest import PYTHON, Entrypoint, clean_environment, refusal

GROUPS = all_groups()
EXAMPLE = """
[launch]
nproc_per_node = 2
quiet = true

[train]
epochs = 3
lr = 0.1
lr_layer_decay = 0.75
model = "resnet18"
optimizer_args = "betas=0.9,0.95"
data_dir = "/data/pets"
image_size = "auto"
"""


def written(folder: Path, text: str) -> Path:
    (folder / "run.toml").write_text(text)
    return folder / "run.toml"


def test_file_becomes_variables_and_those_that_are_set_win(tmp_path: Path) -> None:
    path = written(tmp_path, EXAMPLE)
    assert read_config(path, GROUPS) == {
        "LAUNCH_NPROC_PER_NODE": "2", "LAUNCH_QUIET": "1", "TRAIN_EPOCHS": "3", "TRAIN_LR": "0.1",
        "TRAIN_LR_LAYER_DECAY": "0.75", "TRAIN_MODEL": "resnet18", "TRAIN_OPTIMIZER_ARGS": "betas=0.9,0.95",
        "TRAIN_DATA_DIR": "/data/pets", "TRAIN_IMAGE_SIZE": "auto",
    }  # fmt: skip
    environ = with_config({"TRAIN_EPOCHS": "9", "TRAIN_LR": "", "HOME": "/h"}, path, GROUPS)
    assert (environ["TRAIN_EPOCHS"], environ["TRAIN_LR"], environ["HOME"]) == ("9", "0.1", "/h")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[train", "is no TOML"),
        ("epochs = 3", "epochs is no table of settings"),
        ("[trian]", "trian is no table of settings. Did you mean train?"),
        ("[train]\nepoch = 3", "epoch in [train] is no setting. Did you mean epochs?"),
        ("[train]\nTRAIN_EPOCHS = 3", "TRAIN_EPOCHS in [train] is no setting"),
        ("[train]\nepochs = [3]", "train.epochs is a list"),
        ("[train]\nepochs = true", "train.epochs is no switch. Write "),
        ("[train]\nmodel = false", "train.model is no switch. Write "),
        ("[train]\nepochs = 2026-11-26", "train.epochs is a date"),
        ("[train.epochs]\na = 1", "train.epochs is a dict"),
    ],
)
def test_file_that_sets_no_setting_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    message = refusal(read_config, written(tmp_path, text), GROUPS)
    assert said in message
    assert message.startswith(f"--config={tmp_path}/run.toml: ")


def test_file_of_a_windows_editor_is_read_or_named(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes("[train]\r\nepochs = 3\r\n".encode("utf-8-sig"))
    assert read_config(file, GROUPS) == {"TRAIN_EPOCHS": "3"}
    file.write_bytes("[train]\nepochs = 3\n".encode("utf-16"))
    refusal(read_config, file, GROUPS, match="is not UTF-8 but UTF-16, or no text")


@pytest.mark.parametrize("path", ["nobody.toml", "/dev/zero", "/"])
def test_file_that_cannot_be_read_is_one_line(path: str) -> None:
    refusal(read_config, Path(path), GROUPS, match=r"^--config=.*: cannot be read \(")


def test_defaults_written_to_a_file_are_the_defaults(tmp_path: Path) -> None:
    lines = []
    for table, model in GROUPS.items():
        lines.append(f"[{table}]")
        values = model().to_json().items()
        known = {name: value for name, value in values if value is not None and name not in model.OF_TRAINER}
        lines += [f"{name.rstrip('_')} = {json.dumps(value)}" for name, value in known.items()]
    environ = read_config(written(tmp_path, "\n".join(lines)), GROUPS)
    for model in GROUPS.values():
        own = {name: text for name, text in environ.items() if name.startswith(model.PREFIX)}
        assert read_settings(model, own, {}).values == model()


@pytest.mark.launch
def test_file_reaches_plan_and_ranks(entrypoint: Entrypoint) -> None:
    (entrypoint.folder / "run.toml").write_text("[train]\nepochs = 1\nrun_name = 'toml'\ntensorboard = false\n")
    for words in (("plan", "--config", "run.toml"), ("train", "--config=run.toml", "--dry-run")):
        result = entrypoint.succeed(*words)
    entrypoint.train("--config", "run.toml", "--seed=3")
    summary = entrypoint.summary("toml")
    assert (summary["epochs"], summary["seed"]) == (1, 3)
    result = entrypoint("plan", "--config", "nobody.toml")
    assert (result.code, len(result.err.splitlines())) == (2, 1)


@pytest.mark.launch
def test_settings_are_printed(entrypoint: Entrypoint) -> None:
    assert "--lr-layer-decay, TRAIN_LR_LAYER_DECAY" in entrypoint("settings").out


@pytest.mark.launch
@pytest.mark.parametrize("command", ["plan", "train", "runs", "predict x y", "evaluate x"])
def test_removed_working_folder_is_one_line(entrypoint: Entrypoint, command: str) -> None:
    words = f'mkdir gone && cd gone && rmdir ../gone && exec "{PYTHON}" -I -m entrypoint {command}'
    environ = {**clean_environment(), "HOME": str(entrypoint.home)}
    done = subprocess.run(
        ["sh", "-c", words], cwd=entrypoint.folder, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("entrypoint: error: The working folder was removed")
    assert len(done.stderr.splitlines()) == 1
