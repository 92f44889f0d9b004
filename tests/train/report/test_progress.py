"""What is shown while training."""

from __future__ import annotations

import pytest

from tests.factories import train_settings
from train.report.progress import BarProgress, LineProgress, ProgressReporter, build_progress
from train.settings import TrainSettings


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
    progress = build_progress(train_settings({"progress": asked}), 10, 2, is_main=is_main)
    assert type(progress) is kind
    progress.close()


@pytest.mark.parametrize(("relayed", "kind"), [(False, BarProgress), (True, LineProgress)])
def test_progress_relayed_terminal_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], relayed: bool, kind: type
) -> None:
    with capsys.disabled():
        monkeypatch.setattr("sys.stdout.isatty", lambda: True)
        progress = build_progress(TrainSettings(), 10, 2, is_main=True, relayed=relayed)
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
