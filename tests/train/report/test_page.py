"""report.html: one file that a browser shows without a network, on a desk and on a phone."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from copy import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from entrypoint.core.errors import UserError
from tests.conftest import FUZZ_EXAMPLES, PYTHON, Entrypoint, refusal
from tests.train.given import imagefolder
from train.report.metrics import read_metrics
from train.report.page import advise, page_of, plots_of, write_report
from train.report.show import compare_command, runs_command

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
EVIL = "<script>document.title=1</script>"
SUMMARY = {
    "test_accuracy": 61.5, "best_accuracy": 62.0, "best_chosen_on": "test", "images_per_second": 1234.5, "epochs": 4,
    "train_seconds": 9.5, "parameters": 1000, "world_size": 2, "device": "cpu", "model": EVIL,
}  # fmt: skip
# A red pixel.
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
EVALUATION = {
    "classes": ["cat", "dog", EVIL], "class_accuracy": {"cat": 50.0, "dog": 80.0, EVIL: None},
    "confusion": [[5, 4, 1], [2, 8, 0], [0, 0, 0]],
    "mistakes": [{"class": "cat", "predicted": EVIL, "probability": 0.97, "png": PNG}],
    "features": {"cat": [[1.0, 2.0], [2.0, 3.0]], "dog": [], EVIL: [[-4.0, 0.5]]},
}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the folder of a run with everything that a page shows, and hostile names in it."""
    folder = tmp_path / "a run & more"
    folder.mkdir()
    write_run(folder, SUMMARY, EVALUATION)
    return folder


def write_run(folder: Path, summary: dict[str, Any], evaluation: dict[str, Any]) -> None:
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "evaluation.json").write_text(json.dumps(evaluation))
    decision = {"key": "precision", "value": "fp32", "reason": f"the default {EVIL}"}
    plan = {
        "decisions": [decision],
        "warnings": [f"careful {EVIL}"],
        "binding": {"core_map": ["socket 0: 00 11"]},
    }
    (folder / "plan.json").write_text(json.dumps(plan))
    (folder / "settings.json").write_text(json.dumps({"precision": "fp32", "data_dir": EVIL}))
    (folder / "ranks.json").write_text(json.dumps([{"rank": 0, "cpus": [0, 1]}, {"rank": 1, "cpus": [2, 3]}]))
    lines = [
        {"kind": "step", "step": s, "epoch": s / 10, "loss": 1 / s, "images_per_second": 900} for s in range(1, 40)
    ]
    lines += [
        {"kind": "epoch", "step": 10 * e, "epoch": e, "test_loss": 1.0 + (e == 4), "test_accuracy": 60}
        for e in (1, 2, 3, 4)
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def test_page_has_everything_and_escapes_names(run: Path) -> None:
    text = write_report(run).read_text()
    for title in ("What to change", "Curves", "Surest mistakes", "Classes", "Confusion matrix", "Plan", "Settings"):
        assert f"<h2>{title}</h2>" in text
    assert "test images by their features" in text
    assert "<script" not in text
    assert not re.search(r"(?:src|href)=\"(?!data:|#)", text), "the page needs no network"
    assert not re.search(r"url\(http|@import", text)
    assert text == page_of(run, SUMMARY), "the same run gives the same page"


def test_advice_names_the_setting(run: Path) -> None:
    text = write_report(run).read_text()
    for said in ("TRAIN_VAL_SPLIT=0.1", "lowest after epoch 1"):
        assert said in text
    slow = advise({"cpu_wait_share": 0.5, "data_share": 0.4, "data_slow_part": "disk"}, [])
    assert [re.search(r"tune|TRAIN_NUM_WORKERS", one) is not None for one in slow] == [True] * 2
    assert advise({"best_chosen_on": "val"}, []) == []


def test_folder_without_a_finished_run_is_one_line(tmp_path: Path) -> None:
    refusal(write_report, tmp_path, match=r"holds no finished run, as it has no summary\.json")
    (tmp_path / "summary.json").write_text("{")
    refusal(write_report, tmp_path, match=r"summary\.json: is not what a run writes")
    (tmp_path / "summary.json").write_text("{}")
    assert write_report(tmp_path).is_file()


# What a stranger may have put into a run's file, wherever it stands.
STRANGE = (
    None,
    "x",
    "",
    -1,
    1e308,
    float("nan"),
    float("inf"),
    10**400,
    True,
    [],
    {},
    [[]],
    {"a": {}},
    ["x", 1],
    "\ud800",
)
FILES = ("summary.json", "plan.json", "evaluation.json", "settings.json", "ranks.json", "metrics.jsonl")


def places_in(value: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield from places_in(one, (*path, key))


def with_strange(value: Any, path: tuple[Any, ...], strange: object) -> Any:
    if not path:
        return strange
    changed = copy(value)
    changed[path[0]] = with_strange(value[path[0]], path[1:], strange)
    return changed


def test_runs_of_each_state_are_listed(tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, name in enumerate(("whole", "stopped", "trains", "failed", "damaged", "strange")):
        shutil.copytree(run, tmp_path / "all" / name)
        if name not in ("whole", "strange"):
            (tmp_path / "all" / name / "summary.json").unlink()
        os.utime(tmp_path / "all" / name / "settings.json", (number, number))
    folder = tmp_path / "all"
    (folder / "strange/summary.json").write_text('{"total_seconds": "long"}')
    (folder / "damaged/settings.json").write_text("{")
    (folder / "stopped/checkpoint/step-000000003").mkdir(parents=True)
    (folder / "trains/.lock").touch()
    shutil.copytree(folder / "whole", folder / "again")
    (folder / "again/.lock").touch()
    (folder / "latest").symlink_to("whole")
    (folder / "other").mkdir()
    runs_command([str(folder)])
    states = {line.split()[0]: line.split()[1] for line in capsys.readouterr().out.splitlines()[1:]}
    assert states == {
        "strange": "damaged", "damaged": "damaged", "failed": "failed", "trains": "trains", "again": "trains",
        "stopped": "unfinished", "whole": "finished",
    }  # fmt: skip


def test_runs_of_any_name_are_compared(tmp_path: Path, run: Path) -> None:
    names = [r"a$\q$", "_base", "<b>&"]
    for name in names:
        shutil.copytree(run, tmp_path / "all" / name)
    compare_command([str(tmp_path / "all" / name) for name in names])
    drawn = re.findall(r">([^<>]+)</text>", (tmp_path / "all/compare.html").read_text())
    assert {r"a$\q$", "_base", "&lt;b&gt;&amp;"} <= set(drawn)


@pytest.mark.generated
@settings(max_examples=FUZZ_EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_file_that_somebody_changed_is_one_line(
    run: Path, data: st.DataObject, capsys: pytest.CaptureFixture[str]
) -> None:
    name = data.draw(st.sampled_from(FILES))
    slow = {"stragglers": STRAGGLERS, "data_share": 0.5, "cpu_wait_share": 0.5, "images_skipped": 3}
    write_run(run, SUMMARY | slow, EVALUATION if name == "evaluation.json" else {})
    *lines, last = (run / name).read_text().splitlines()
    path = data.draw(st.sampled_from([*places_in(json.loads(last))]))
    changed = with_strange(json.loads(last), path, data.draw(st.sampled_from(STRANGE)))
    (run / name).write_text("\n".join([*lines, json.dumps(changed)]))
    try:
        if lines:  # drawing takes most of the time, and floats of any size are drawn
            kept = read_metrics(run)
            assert isinstance((plots_of(kept), advise(SUMMARY, kept)), tuple)
            return
        (run / "metrics.jsonl").unlink()
        write_report(run)
        if name in ("summary.json", "settings.json"):
            compare_command([str(run), str(run)])
    except UserError as error:
        assert "\n" not in str(error)
        assert name in str(error)
    capsys.readouterr()


STRAGGLERS = {
    "ranks": [
        {"rank": row, "node": "n", "step_ms": 1.5, "exchange_wait_ms": None, "gpu_clock_mhz": 900 + 500 * row,
         "gpu_max_clock_mhz": 1500, "gpu_slowed_by": None}
        for row in (0, 1)
    ],
    "slowest_rank": 1, "slowest_rank_node": "n", "slowest_rank_cost_percent": 12.0, "slowest_node": None,
    "slowest_node_cost_percent": None,
}  # fmt: skip


def browse(page: Path, width: int, *more: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--window-size={width},2000")
    profile = f"--user-data-dir={page.parent / 'profile'}"
    return subprocess.run(
        [CHROMIUM, *options, profile, *more, page.as_uri()], capture_output=True, text=True, timeout=100, check=True
    )


@pytest.mark.launch
@pytest.mark.browser
@needs_chromium
@pytest.mark.parametrize("width", [1280, 500])
def test_browser_shows_the_page_without_an_error(run: Path, width: int) -> None:
    page = run / "probed.html"
    measure = "<script>document.title=[document.documentElement.scrollWidth,innerWidth,document.images.length]</script>"
    page.write_text(write_report(run).read_text().replace("</body>", f"{measure}</body>"))
    done = browse(page, width, "--dump-dom")
    assert "CONSOLE" not in done.stderr
    found = re.search(r"<title>(\d+),(\d+),(\d+)</title>", done.stdout)
    assert found, done.stdout[:500]
    content, window, images = map(int, found.groups())
    assert content <= window, "nothing has to be scrolled sideways"
    assert images == 1


@pytest.mark.launch
def test_commands_make_the_report_again_and_compare_runs(entrypoint: Entrypoint, image_folder: Path) -> None:
    env = imagefolder(image_folder) | {"LAUNCH_QUIET": "1", "TRAIN_TENSORBOARD": "0"}
    entrypoint.train("--run-name=a", env=env)
    entrypoint.train("--run-name=b", "--lr=0.01", env=env)
    page = entrypoint.folder / "runs/a/report.html"
    first = page.read_text()
    page.unlink()
    result = entrypoint("report", "runs/a")
    assert (result.code, result.out) == (0, "runs/a/report.html\n")
    assert page.read_text() == first
    assert (
        "data:image/png;base64," in first
        or json.loads((page.parent / "summary.json").read_text())["test_accuracy"] == 100
    )
    compared = entrypoint.succeed("compare", "runs/a", "runs/b")
    assert re.search(r"^ +a +b$", compared.out, re.M)
    assert re.search(r"^TRAIN_LR +auto +0\.01$", compared.out, re.M)
    assert compared.out.endswith("\nruns/compare.html\n")
    content = (entrypoint.folder / "runs/compare.html").read_text()
    assert content.count("<svg") == 4, "losses of both parts, accuracy and speed"
    assert "<th>TRAIN_LR</th><td>auto</td><td>0.01</td>" in content
    listed = entrypoint("runs").out.splitlines()
    assert listed[0].split() == ["state", "score", "epochs", "minutes", "model", "dataset"]
    assert [line.split()[:2] for line in listed[1:]] == [["b", "finished"], ["a", "finished"]]
    for words, said in (
        (("runs", "nobody"), "nobody: No such file or directory. Name a folder of runs."),
        (("report", "nobody"), "holds no finished run"),
        (("compare", "runs/a"), "needs finished runs"),
        (("compare", "runs/a", "runs/compare.html"), "needs finished runs"),
        (("runs", "compare.html"), "compare.html: "),
        (("runs", "runs", "other"), "runs other: one folder at a time."),
    ):
        result = entrypoint(*words)
        assert result.code == 2
        assert said in result.err


DRAW = """
import threading
class AtOnce(threading.Timer):
    def __init__(self, interval, function):
        super().__init__(0, function)
threading.Timer = AtOnce
from train.report.page import drawings, plots_of
lines = [
    {"kind": "step", "step": step, "epoch": step / 10, "loss": 1.0, "images_per_second": 5.0} for step in range(5)
]
assert "<svg" in "".join(drawings(plots_of(lines)))
"""


@pytest.mark.launch
def test_drawing_prints_nothing(tmp_path: Path) -> None:
    """Matplotlib lists the fonts in a new home folder, and says so when that takes five seconds: here at once."""
    env = {**os.environ, "HOME": str(tmp_path), "MPLCONFIGDIR": str(tmp_path / "matplotlib")}
    done = subprocess.run([PYTHON, "-c", DRAW], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
