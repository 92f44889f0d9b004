"""Metrics, events and summary."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import pytest

from train.report.metrics import MetricsWriter, read_metrics
from train.report.page import drawings, plots_of


def write_run(folder: Path, *, tensorboard: bool = False) -> None:
    recorder = MetricsWriter(folder, tensorboard=tensorboard)
    for epoch in (1, 2):
        step = {"epoch": epoch - 0.5, "loss": 1 / epoch, "images_per_second": 100.0}
        recorder.write("step", 10 * epoch - 5, step)
        done = {"epoch": epoch, "train_loss": 1 / epoch, "test_loss": 1.0, "test_accuracy": 50.0 * epoch}
        recorder.write("epoch", 10 * epoch, done)
    recorder.summary({"test_accuracy": 100.0})
    recorder.close()


def test_metrics_lines_are_json(tmp_path: Path) -> None:
    write_run(tmp_path)
    kinds = [line["kind"] for line in read_metrics(tmp_path)]
    assert kinds == ["step", "epoch", "step", "epoch"]
    assert json.loads((tmp_path / "summary.json").read_text()) == {"test_accuracy": 100.0}


def test_single_point_is_no_curve(tmp_path: Path) -> None:
    write_steps(tmp_path, range(1, 2))
    assert read_metrics(tmp_path)
    assert not drawings(plots_of(read_metrics(tmp_path)))


def test_metrics_repeated_step_counts_once(tmp_path: Path) -> None:
    for _ in range(2):
        write_run(tmp_path)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 8
    assert len(read_metrics(tmp_path)) == 4


def test_tensorboard_has_equal_numbers(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    write_run(tmp_path, tensorboard=True)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    scalars = [(event.step, event.value) for event in events.Scalars("epoch/test_accuracy")]
    assert scalars == [(10, 50.0), (20, 100.0)]


def write_steps(folder: Path, steps: range, *, resumed_step: int | None = None) -> None:
    writer = MetricsWriter(folder, tensorboard=True, resumed_step=resumed_step)
    for step in steps:
        writer.write("step", step, {"epoch": step / 10, "loss": 1 / step, "images_per_second": 1.0})
    writer.close()


def test_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    """A run that was killed at step 9 goes on from its checkpoint at step 5."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    write_steps(tmp_path, range(1, 10))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')  # the line that the kill cut off
    write_steps(tmp_path, range(6, 13), resumed_step=5)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 13))
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("step/loss")] == list(range(1, 13))


CUT_LINES = (
    '{"kind": "step", "st', "", "null", "[]", '{"step": 3}', '{"kind": "step", "step": "x"}',
    '{"kind": "step", "step": 1e999}', "\x00" * 50, '{"kind": "step", "step": 3}',
    '{"kind": "step", "step": 3, "loss": null}', "[" * 100_000,
)  # fmt: skip


@pytest.mark.parametrize("resumed_step", [None, 5])
def test_cut_lines_end_no_run(tmp_path: Path, resumed_step: int | None, capsys: pytest.CaptureFixture[str]) -> None:
    write_steps(tmp_path, range(1, 10))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("\n".join([*CUT_LINES, CUT_LINES[0]]))
    write_steps(tmp_path, range(6, 13), resumed_step=resumed_step)
    steps = {line["step"] for line in read_metrics(tmp_path)}
    assert steps >= {*range(1, 3), *range(7, 13)}
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["metrics.jsonl", "tensorboard"])
def test_file_that_cannot_be_written_is_one_line(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "tensorboard":
        pytest.importorskip("tensorboard")
        (tmp_path / name).write_text("in its place")
    else:
        (tmp_path / name).mkdir()
    write_steps(tmp_path, range(1, 10))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"train: {tmp_path / name} cannot be written (")
    assert line.endswith("; the training goes on without it")


def test_full_disk_cuts_a_line_and_later_ones_follow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = MetricsWriter(tmp_path, tensorboard=False)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150, hard))
    try:
        for step in range(1, 6):
            writer.write("step", step, {"epoch": 1, "loss": 0.5, "images_per_second": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    for step in range(6, 8):
        writer.write("step", step, {"epoch": 1, "loss": 0.5, "images_per_second": 1.0})
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 7]  # 6 follows the part of a line


def test_json_has_no_number_that_is_not_finite(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        MetricsWriter(tmp_path, tensorboard=False).summary({"test_loss": float("nan")})
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.parametrize("resumed_step", [None, 3])
@pytest.mark.parametrize("kind", ["FIFO", "endless", "folder"])
def test_metrics_file_that_is_none_ends_no_run(tmp_path: Path, kind: str, resumed_step: int | None) -> None:
    path = tmp_path / "metrics.jsonl"
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    said: list[str] = []
    writer = MetricsWriter(tmp_path, tensorboard=False, resumed_step=resumed_step, warn=said.append)
    writer.write("step", 1, {"epoch": 0.5, "loss": 1.0, "images_per_second": 1.0})
    writer.close()
    assert len(said) == 1
    assert "metrics.jsonl cannot be written" in said[0]
