"""`--resume RUN --epochs 20` trains a run for longer, with its own settings."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from entrypoint.cli.build_plan import warn_of_other_ranks
from tests.conftest import LAUNCH_LIMIT_S, Entrypoint, clean_environment, refusal
from tests.factories import make_machine, make_test_plan
from train.data.dataset_info import DatasetInfo
from train.models.weights_origin import PACKAGED_NETWORK
from train.planning.recipes import read_recipe, with_recipe
from train.planning.trained_run import with_resumed_settings
from train.settings import TrainSettings, read_train_settings


def resumed(folder: Path, **fields: str) -> tuple[TrainSettings, str]:
    flags = {f"TRAIN_{name.upper()}": value for name, value in {"resume": str(folder), **fields}.items()}
    parsed, variables, decisions = with_resumed_settings(read_train_settings({}, flags), {}, flags)
    assert read_train_settings(variables, flags).values == parsed.values, "the ranks read the same"
    return parsed.values, "".join(one.reason for one in decisions)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    before = TrainSettings().with_values(
        model="resnet18", lr=0.5, epochs=3, data_dir=Path("/photos"), decay_norms=False, run_name="a"
    )
    (tmp_path / "settings.json").write_text(json.dumps(before.to_json()))
    return tmp_path


def test_settings_are_those_of_the_run(run: Path) -> None:
    values, reason = resumed(run)
    assert (values.network.model, values.optim.lr, values.optim.epochs, values.optim.decay_norms) == (
        "resnet18",
        0.5,
        3,
        False,
    )
    assert (str(values.data.data_dir), values.run.run_name, values.run.resume_allow_changed) == ("/photos", None, False)
    assert reason == "settings of that run"


def test_output_folder_of_another_run_is_refused(run: Path) -> None:
    said = f"--output-dir=x: the run goes on in {run}. Leave it out, or set TRAIN_RUN_NAME for a new run."
    refusal(resumed, run, match=re.escape(said), output_dir="x")
    assert resumed(run, output_dir="x", run_name="b")
    assert resumed(run, output_dir=str(run.parent))


@pytest.mark.parametrize(("field", "value"), [("epochs", "20"), ("steps", "900")])
def test_own_settings_win_and_the_schedule_is_told(run: Path, field: str, value: str) -> None:
    values, reason = resumed(run, **{field: value})
    assert (values.value(field), values.optim.lr, values.run.resume_allow_changed) == (int(value), 0.5, False)
    assert reason.startswith(f"settings of that run, but --{field}={value}; the schedule onecycle covers {value} ")


@pytest.mark.parametrize("name", ["speedrun", "finetune", "imagenet", "vit"])
@pytest.mark.parametrize("steps", [None, 7])
def test_recipe_changes_no_default_that_the_user_had_set(tmp_path: Path, name: str, steps: int | None) -> None:
    fields = read_recipe(name, "cpu")
    before = TrainSettings().with_values(recipe=name, model="resnet18", steps=steps)  # type: ignore[arg-type]
    (tmp_path / "settings.json").write_text(json.dumps(before.to_json()))
    flags = {"TRAIN_RESUME": str(tmp_path)}
    parsed, _, _ = with_resumed_settings(read_train_settings({}, flags), {}, flags)
    photos = DatasetInfo(800, (3, 32, 32), train_images=800)
    chosen, _ = with_recipe(parsed, make_test_plan(make_machine(4), {}), photos)
    for field in fields:
        assert chosen.values.value(field) == before.value(field), field


def test_recipe_enlarges_no_images_that_were_trained_as_they_are(tmp_path: Path) -> None:
    before = TrainSettings().with_values(recipe="finetune", dataset="csv", data_dir=tmp_path, weights="pretrained")
    (tmp_path / "settings.json").write_text(json.dumps(before.to_json()))
    flags = {"TRAIN_RESUME": str(tmp_path)}
    parsed, _, _ = with_resumed_settings(read_train_settings({}, flags), {}, flags)
    photos = DatasetInfo(800, (3, 32, 32), train_images=800)
    chosen, _ = with_recipe(parsed, make_test_plan(make_machine(4), {}), photos, [PACKAGED_NETWORK])
    assert chosen.values.data.image_size == "auto"


def test_checkpoint_brings_no_settings(tmp_path: Path) -> None:
    values, reason = resumed(tmp_path)
    assert (values.network.model, reason) == ("cnn", "")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "its settings.json cannot be read"),
        ("[]", "its settings.json cannot be read"),
        ('{"epochs": "many"}', "its settings.json cannot be read"),
        ('{"model": "package:network"}', "its model is the code package:network, which a file may not choose"),
    ],
)
def test_file_that_is_no_run_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "settings.json").write_text(text)
    assert said in refusal(resumed, tmp_path)


@pytest.mark.launch
@pytest.mark.parametrize(
    "setting",
    [
        {"val_split": 0.2}, {"export": "torch-export"}, {"compile": "default"}, {"compile": "auto"},
        {"precision": "bf16"}, {"ipex": "off"}, {"parallelism": "fsdp"}, {"steps": 40},
        {"label_smoothing": 0.1, "loss": "bce"},
    ],
    ids=str,
)  # fmt: skip
def test_plan_of_a_resumed_run_knows_its_settings(entrypoint: Entrypoint, setting: dict[str, object]) -> None:
    before = TrainSettings().with_values(**setting)
    (entrypoint.folder / "runs/a").mkdir(parents=True)
    (entrypoint.folder / "runs/a/settings.json").write_text(json.dumps(before.to_json()))
    planned = entrypoint("plan", "--resume=runs/a", "--nproc-per-node=1", "--verbose")
    assert "Traceback" not in planned.err
    assert planned.code == 0 or planned.error_lines, planned.err


@pytest.mark.launch
def test_longer_run_keeps_its_folder_and_its_commands_repeat_it(entrypoint: Entrypoint) -> None:
    runs = "other runs"

    def train(*arguments: str) -> None:
        entrypoint.succeed("train", *arguments, "--threads=1", "--progress=off", "--tensorboard=0")

    def summary(name: str) -> tuple[int, str]:
        written = json.loads((entrypoint.folder / runs / name / "summary.json").read_text())
        return written["epochs"], written["weights_sha256"]

    train("--epochs=1", "--lr=0.03", "--run-name=a", f"--output-dir={runs}")
    train(f"--resume={runs}/a", "--epochs=2")
    folder = entrypoint.folder / runs / "a"
    assert (entrypoint.folder / runs / "latest").resolve() == folder
    assert json.loads((folder / "settings.json").read_text())["lr"] == 0.03
    commands = (folder / "command.txt").read_text()
    assert len(commands.splitlines()) == 2
    train(f"--resume={runs}/a")
    assert (folder / "command.txt").read_text() == commands, "nothing was changed, and nothing left to train"
    env = {**clean_environment(), "HOME": str(entrypoint.home)}
    subprocess.run(["bash", "-c", commands], env=env, check=True, capture_output=True, timeout=LAUNCH_LIMIT_S)
    assert (entrypoint.folder / runs / "latest").resolve() != folder
    assert summary("latest") == summary("a")
    assert summary("a")[0] == 2
    assert "Set it to auto, off, a run folder or a checkpoint." in entrypoint.error_line("plan", "--resume=runs")


def test_other_number_of_ranks_is_told() -> None:
    one, two = (make_test_plan(make_machine(), {"LAUNCH_NPROC_PER_NODE": count}) for count in "12")
    assert warn_of_other_ranks(one, two) == ("the run had 2 ranks before: with 1 its weights round differently",)
    assert warn_of_other_ranks(two, two) == warn_of_other_ranks(two, None) == ()
