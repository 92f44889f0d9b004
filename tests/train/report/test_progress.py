"""What a run shows while it trains: lines, a batch as the network sees it, and the page with the curves so far."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.conftest import refusal
from tests.factories import train_settings
from train.report.metrics import MetricsWriter
from train.report.page import write_report
from train.report.progress import BarProgress, LineProgress, LivePage, ProgressReporter, build_progress
from train.setting_groups.run import RunSettings


@pytest.mark.parametrize(
    ("asked", "is_main", "kind"),
    [
        ("auto", True, LineProgress),
        ("plain", True, LineProgress),
        ("bar", True, BarProgress),
        ("off", True, ProgressReporter),
        ("bar", False, ProgressReporter),
    ],
)
def test_progress_display_follows_setting_on_rank_0(asked: str, is_main: bool, kind: type) -> None:
    progress = build_progress(train_settings({"progress": asked}).run, 10, 2, is_main=is_main)
    assert type(progress) is kind
    progress.close()


@pytest.mark.parametrize(("relayed", "kind"), [(False, BarProgress), (True, LineProgress)])
def test_progress_relayed_terminal_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], relayed: bool, kind: type
) -> None:
    with capsys.disabled():
        monkeypatch.setattr("sys.stdout.isatty", lambda: True)
        progress = build_progress(RunSettings(), 10, 2, is_main=True, relayed=relayed)
    assert type(progress) is kind
    progress.close()


def test_line_progress_formats_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    LineProgress(10, 500).update(2, 120, 1.23456, 12345.6, 61)
    assert capsys.readouterr().out == "epoch 3/10  step 120/500  loss 1.2346  12,346 images/s  left 0:01:01\n"


def test_bar_progress_shows_same_values(capsys: pytest.CaptureFixture[str]) -> None:
    bar = BarProgress(10, 500)
    bar.update(2, 120, 1.23456, 12345.6, 61)
    bar.print("epoch 3/10 [done]")
    bar.close()
    out = capsys.readouterr().out
    assert "epoch 3/10 [done]" in out
    assert "step 120/500" in out
    assert "loss 1.2346" in out


SO_FAR = {"test_accuracy": 31.25, "epochs": 1}


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LivePage]:
    metrics = MetricsWriter(tmp_path, tensorboard=False, resumed_step=None, warn=print)
    yield LivePage(tmp_path, metrics, due_s=0.0)
    metrics.close()


@pytest.mark.parametrize(("channels", "side", "pixel"), [(1, 8, 64), (3, 8, 64), (3, 100, 100)])
def test_batch_is_a_image_of_its_first_images(live: LivePage, channels: int, side: int, pixel: int) -> None:
    live.show_batch(torch.full((40, channels, side, side), 200, dtype=torch.uint8))
    with Image.open(live.folder / "batch.png") as image:
        assert image.size == (8 * (pixel + 2) + 2, 4 * (pixel + 2) + 2)
        assert image.convert("RGB").getpixel((10, 10)) == (200, 200, 200)
    write_report(live.folder, SO_FAR)
    assert 'class="batch"' in (live.folder / "report.html").read_text()


def test_batch_of_other_channels_has_no_image(live: LivePage) -> None:
    live.show_batch(torch.zeros((2, 4, 8, 8), dtype=torch.uint8))
    assert not (live.folder / "batch.png").exists()


def test_page_of_a_run_that_trains_loads_itself_again(live: LivePage) -> None:
    live.show_epoch(SO_FAR)
    text = (live.folder / "report.html").read_text()
    assert 'http-equiv="refresh"' in text
    assert "31.25 %" in text
    (live.folder / "report.html").unlink()
    live.show_epoch(SO_FAR)
    assert not (live.folder / "report.html").exists(), "it takes 2 % of the time at most"
    refusal(write_report, live.folder, match="holds no finished run")


def test_accuracy_on_val_is_not_called_that_on_test(live: LivePage) -> None:
    live.show_epoch({"val_accuracy": 31.25, "best_chosen_on": "val", "epochs": 1})
    assert "<div>test accuracy<b>–</b></div>" in (live.folder / "report.html").read_text()


def test_file_that_cannot_be_written_is_told_once(live: LivePage, capsys: pytest.CaptureFixture[str]) -> None:
    (live.folder / "batch.png").mkdir()
    for _ in range(2):
        live.show_batch(torch.zeros((2, 3, 8, 8), dtype=torch.uint8))
    assert capsys.readouterr().out.count("batch.png cannot be written") == 1
