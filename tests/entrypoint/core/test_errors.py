"""How a refusal is reported: on standard error, or to torchrun's agent."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from entrypoint.core.console import last_error_line, report_error
from entrypoint.core.errors import ExitCode, PeerLostError, UserError, did_you_mean, printable


def test_report_error_prints_one_line_returns_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_error(UserError("X=1: wrong; do this", ExitCode.MACHINE)) == 3
    assert capsys.readouterr().err == "entrypoint: error: X=1: wrong; do this\n"


@pytest.mark.parametrize(("error", "lost"), [(UserError("why"), False), (PeerLostError("why"), True)])
def test_report_error_with_agent_writes_error_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: UserError, lost: bool
) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    report_error(error)
    assert capsys.readouterr().err == ""
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(tmp_path / "error.json"))
    extra = json.loads((tmp_path / "error.json").read_text())["message"]["extraInfo"]
    assert failure.message == {"message": "why", "extraInfo": extra}
    assert failure.timestamp == int(extra["timestamp"])
    assert (extra["refused"], extra["lost_peer"]) == (True, lost)


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("ncl", "nccl"),
        ("zzz", ""),
        ("NCCL", "nccl"),
        ("oneccl", "ccl"),
        ("CIFAR10", "cifar10"),
        ("FashionMNIST", "fashion-mnist"),
        ("float16", "fp16"),
        ("bfloat16", "bf16"),
        ("", ""),
    ],
)
def test_did_you_mean_suggests_only_close_words(word: str, hint: str) -> None:
    known = ["auto", "gloo", "nccl", "ccl", "cifar10", "fashion-mnist", "fp16", "bf16"]
    assert did_you_mean(word, known) == (f"Did you mean {hint}? " if hint else "")


def test_readme_lists_every_exit_code() -> None:
    readme = (Path(__file__).parents[3] / "README.md").read_text()
    table = readme[readme.index("## Output and exit codes") :]
    for code in ExitCode:
        assert re.search(rf"^\| (\d+, )?{int(code)}(, \d+)? \|", table, re.MULTILINE), code


@pytest.mark.parametrize(
    ("said", "last"),
    [
        ("", "nothing"),
        ("one\ntwo\n\n", "two"),
        ("warning\nentrypoint: error: TRAIN_LR=x: no number\n", "TRAIN_LR=x: no number"),
    ],
)
def test_last_error_line_strips_error_prefix(said: str, last: str) -> None:
    assert last_error_line(said, "nothing") == last


@pytest.mark.parametrize(
    ("value", "length"), [("x" * 80, 80), ("x" * 81, 80), ("/data/" + "x" * 300, 306), ("/data/" + "x" * 3000, 400)]
)
def test_printable_cuts_values_and_keeps_paths(value: str, length: int) -> None:
    assert len(printable(value)) == length
    assert printable(value)[:77] == value[:77]
