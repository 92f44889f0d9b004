"""Where a run goes, also where many start at once, and what says how it came about."""

from __future__ import annotations

import multiprocessing
import shlex
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from entrypoint.core.errors import UserError
from tests.conftest import refusal
from tests.factories import make_machine, make_test_plan, train_settings
from train.lock_file import RunLock
from train.report import run_folder
from train.settings import TrainSettings, read_train_settings


def settings(output: Path, **more: object) -> TrainSettings:
    return train_settings({"output_dir": output, **more})


def test_runs_of_the_same_second_get_separate_folders(tmp_path: Path) -> None:
    folders = [run_folder.open_folder(settings(tmp_path / "runs"), RunLock())[0] for _ in range(5)]
    assert len(set(folders)) == 5
    assert (tmp_path / "runs/latest").resolve() == folders[-1].resolve()


@pytest.mark.parametrize("output", ["/sys", "/sys/runs", "/dev/null/runs"])
def test_unwritable_run_folder_raises_even_for_root(output: str) -> None:
    refusal(
        run_folder.open_folder,
        settings(Path(output)),
        RunLock(),
        match=rf"TRAIN_OUTPUT_DIR={output}: cannot be written",
    )


def test_reproduce_command_has_settings_and_is_quoted(tmp_path: Path) -> None:
    environ = {"TRAIN_DATA_DIR": str(tmp_path / "my $data; rm"), "TRAIN_RUN_NAME": "x"}
    given = read_train_settings(environ, {"TRAIN_EPOCHS": "3"})
    plan = make_test_plan(make_machine(2), environ)
    words = shlex.split(run_folder.reproduce_command(given, plan, environ, Path("runs")))
    assert words[:2] == ["cd", str(Path.cwd())]
    assert {
        "LAUNCH_THREADS=2",
        "LAUNCH_NPROC_PER_NODE=1",
        "LAUNCH_RESERVE_CPUS=0",
        "TRAIN_EPOCHS=3",
        f"TRAIN_DATA_DIR={tmp_path}/my $data; rm",
    } <= set(words)
    assert "TRAIN_RUN_NAME=x" not in words
    assert not [word for word in words if word.startswith("TRAIN_OUTPUT_DIR")]
    elsewhere = shlex.split(run_folder.reproduce_command(given, plan, environ, Path("my other")))
    assert "TRAIN_OUTPUT_DIR=my other" in elsewhere


def test_versions_list_missing_packages() -> None:
    found = run_folder.versions()
    assert found["torch"][0].isdigit()
    assert set(run_folder.RECORDED_PACKAGES) <= set(found)


def test_folder_in_the_place_of_best_is_named_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "run/checkpoint/best").mkdir(parents=True)
    refusal(
        run_folder.open_folder,
        settings(tmp_path, run_name="run", resume="auto"),
        RunLock(),
        match="run/checkpoint/best: is in the place of the run's link",
    )


def test_latest_that_is_no_link_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "latest").mkdir()
    run_folder.open_folder(settings(tmp_path, run_name="run"), RunLock())
    assert (tmp_path / "latest").is_dir()
    assert not (tmp_path / "latest").is_symlink()
    assert "latest is no link, so it is left as it is" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "run"]


def test_run_that_ended_before_its_first_checkpoint_begins_again(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/settings.json").write_text("{}")
    folder, starts = run_folder.open_folder(settings(tmp_path, run_name="run", resume="auto"), RunLock())
    assert (folder, starts) == (tmp_path / "run", [])


STARTS = 48


def start_at(moment: float, output: Path, name: str | None) -> str:
    """Open a run's folder at a moment, and hold it for a second; return the folder, or why it is refused."""
    with RunLock() as lock:
        time.sleep(max(0.0, moment - time.time()))
        try:
            folder, _ = run_folder.open_folder(train_settings(output_dir=output, run_name=name), lock)
        except UserError as error:
            return f"error: {error}"
        time.sleep(1)
        return folder.name


@pytest.mark.launch
@pytest.mark.parametrize("name", [None, pytest.param("mine", marks=pytest.mark.slow)])
def test_many_starts_within_a_second_have_a_folder_each(tmp_path: Path, name: str | None) -> None:
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(STARTS, context) as pool:
        list(pool.map(abs, range(STARTS)))
        moment = time.time() + 2
        found = [one.result() for one in [pool.submit(start_at, moment, tmp_path, name) for _ in range(STARTS)]]
    folders = [one for one in found if not one.startswith("error: ")]
    refused = [one for one in found if one.startswith("error: ")]
    if name is None:
        assert len(set(folders)) == STARTS, refused
    else:
        assert folders == [name]
        assert all("is training in this folder" in one or "already holds a run" in one for one in refused)
    assert (tmp_path / "latest").resolve().name in folders
