"""The book's experiments: what the report makes of what was seen, and one experiment for real."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.book.__main__ import add_tables
from benchmarks.book.experiments import EXPERIMENTS, Experiment, Variant, faster, fewer_parameters, worse_with_ranks
from benchmarks.book.measure import Measured, link_first_images, run_to_the_end, with_speeds
from benchmarks.book.report import Result, as_html, as_markdown
from benchmarks.book.stored_results import StoredResults
from benchmarks.runner import Recording
from entrypoint.settings import read_launch_settings
from tests.conftest import paint
from train.settings import read_train_settings


def measured(
    *speeds: float, accuracy: float = 50.0, parameters: int = 100, rounds: int = 5, waited: float = 0.0
) -> Measured:
    """Return what was seen of a variant: these speeds, each of so many short runs (0: of whole runs alone)."""
    runs = [
        {
            "batch_size": 64, "step_seconds": 64 / speed, "test_accuracy": accuracy, "train_seconds": 2.0,
            "first_step_seconds": 0.5, "parameters": parameters, "cpu_wait_share": waited,
        }
        for speed in speeds
    ]  # fmt: skip
    return Measured(runs, runs * rounds)


@pytest.mark.parametrize(
    ("speeds", "said"),
    [
        ((200, 400), "Holds here: 2.00 times as many images a second, b against a."),
        ((200, 204), "Does not hold here: 1.02 times as many images a second, b against a, which is noise."),
        ((200, 100), "Does not hold here: 0.50 times as many images a second, b against a."),
    ],
)
def test_faster_needs_more_than_noise(speeds: tuple[float, float], said: str) -> None:
    seen = {"a": measured(speeds[0]), "b": measured(speeds[1])}
    assert faster("b", "a")(seen) == said
    assert faster("b", "a")({"a": seen["a"]}) == "Not to be seen here: a variant is missing."


@pytest.mark.parametrize(
    ("accuracies", "said"),
    [
        ((47.0, 47.2, 46.9), "Does not hold here, as it should not: 47.00 %, 47.20 %, 46.90 %"),
        ((47.0, 40.0), "Holds here: 47.00 %, 40.00 %, 7.00 points are lost."),
    ],
)
def test_worse_with_ranks_reports_lost_accuracy(accuracies: tuple[float, ...], said: str) -> None:
    seen = {str(index): measured(100, accuracy=accuracy) for index, accuracy in enumerate(accuracies)}
    assert worse_with_ranks(seen).startswith(said)


def test_medians_and_spread_are_those_of_the_runs() -> None:
    one = measured(100, 120, 90, rounds=0)
    assert (one.speed, one.spread) == (pytest.approx(100), pytest.approx(0.3))
    seen = {"whole": measured(100, parameters=1000), "half": measured(150, accuracy=49.0, parameters=500)}
    assert fewer_parameters(seen) == "Of 1,000: 500 parameters, 1.50 times as fast, -1.00 points."
    seen["half"] = measured(150, accuracy=49.0, parameters=500, rounds=0)
    assert fewer_parameters(seen).startswith("Of 1,000: 500 parameters, -1.00 points. No conclusion on speed: ")


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ({"rounds": 0}, {}, "its speed is of fewer than 5 alternating runs (a)"),
        ({}, {"rounds": 4}, "its speed is of fewer than 5 alternating runs (b)"),
        ({"waited": 0.763}, {}, "other processes took 76 % of the time (a)"),
        ({}, {"waited": 0.11}, "other processes took 11 % of the time (b)"),
    ],
)
def test_disturbed_or_single_runs_give_no_conclusion_on_speed(
    first: dict[str, Any], second: dict[str, Any], said: str
) -> None:
    seen = {"a": measured(10, **first), "b": measured(198.5, **second)}
    assert faster("b", "a")(seen) == f"No conclusion on speed: {said}."
    result = Result(Experiment("2", "x", "x", (Variant("a"), Variant("b")), faster("b", "a")), seen)
    assert "19.85" not in as_markdown([result], [])
    assert "19.85" not in as_html([result], [])


@pytest.mark.seconds
def test_table_row_has_figures_ratios_and_missing_reasons() -> None:
    variants = (Variant("a", {}, 183, 82.98), Variant("b", {}, 76, 80.01), Variant("c"))
    experiment = Experiment("2", "Batch size", "256 is faster than 64.", variants, faster("b", "a"), "images/s")
    result = Result(experiment, {"a": measured(100, 110), "b": measured(300), "c": Measured(refusal="no GPU <here>")})
    text = as_markdown([result], ["2 cores"])
    assert "| b | 76 | 2.41 | 80.01 | 300 | 0 % | 2.86 | 2.0 | 0.50 | 50.00 |" in text
    assert "| c | – | – | – | no GPU <here> |" in text
    assert "**Holds here: 2.86 times as many images a second, b against a.**" in text
    page = as_html([result], ["2 cores"])
    assert "no GPU &lt;here&gt;" in page
    assert 'src="data:image/png;base64,iVBOR' in page
    assert "Not to be seen here" in as_markdown([Result(experiment, {name: Measured() for name in "abc"})], [])


def test_experiments_use_existing_settings() -> None:
    for experiment in EXPERIMENTS:
        assert len({variant.name for variant in experiment.variants}) == len(experiment.variants)
        for variant in experiment.variants:
            settings = {name: value for name, value in variant.settings.items() if not name.startswith("BOOK_")}
            read_launch_settings(settings, {})
            read_train_settings(settings, {})
    assert {one.chapter for one in EXPERIMENTS} == {
        *("2", "3", "3.1", "3.2", "4", "5", "6.1", "7"), *("9.1", "9.2", "9.3", "10.2", "11")
    }  # fmt: skip


# What the book prints: chapter -> (seconds, accuracy) of its rows.
PRINTED = {
    "2": {(148, 83.99), (125, 83.76), (96, None), (76, None), (106, 83.25)},
    "3": {(118, None), (140, None)},
    "3.1": {(2264, 74.26), (1443, 74.38)},
    "3.2": {(2474, 74.68), (2290, 77.57), (1407, 79.90)},
    "4": {(178, None), (114, None), (102, None), (1318, 70), (946, None)},
    "5": {(1892, None), (846, None)},
    "6.1": {
        *((122, 47.10), (118, 47.26), (113, 45.84), (107, 44.66), (100, 45.18), (89, 42.71), (84, 41.90)),
        *((81, 40.84), (76, 38.87)),
    },
    "7": {(811, 51), (754, None), (486, 51)},
    "9.1": {(311, None), (189, None), (119, None), (93, None), (73, None), (73, 45.34)},
    "9.2": {(58, 44.01), (45, 40.11), (37, 38.63)},
    "9.3": {(53, 43.12), (42, 41.03), (35, 37.99)},
    "10.2": {
        *((707, 78.76), (393, 74.82), (276, 72.70), (208, 70.72), (172, 68.34), (142, 69.44), (122, 69.00)),
        *((109, 68.82),),
    },
    "11": {(64, 63.73)},
}


@pytest.mark.parametrize("chapter", PRINTED)
def test_every_figure_that_the_book_prints_is_in_its_table(chapter: str) -> None:
    rows = [variant for one in EXPERIMENTS if one.chapter == chapter for variant in one.variants]
    assert {(row.book_seconds, row.book_accuracy) for row in rows if row.book_seconds} == PRINTED[chapter]


def test_rows_beyond_this_machine_keep_their_reason() -> None:
    wide = Variant("64 threads", {"LAUNCH_THREADS": "4096"}, 73, needs_cores=4096)
    gone = Variant("aot_ts_nvfuser", gone="PyTorch 2.2 removed nvFuser")
    seen = run_to_the_end([wide, gone], {}, [])
    assert seen["64 threads"].refusal.startswith("needs 4096 physical cores, and this machine has ")
    assert seen["aot_ts_nvfuser"].refusal == "PyTorch 2.2 removed nvFuser"


def test_link_first_images_takes_first_of_each_class(tmp_path: Path) -> None:
    for part in ("train", "test"):
        paint(tmp_path / "all" / part, classes=2, each=8)
    link_first_images(tmp_path / "all", tmp_path / "some", 4)
    assert len(list((tmp_path / "some/train/class1").iterdir())) == 4
    assert len(list((tmp_path / "some/test/class0").iterdir())) == 1


def test_speed_from_short_runs_and_accuracy_from_full_runs() -> None:
    one = measured(100, accuracy=60.0, rounds=0)
    one.short = measured(200, 220, 240, accuracy=10.0).summaries
    assert (one.speed, one.accuracy, one.spread) == (pytest.approx(220), 60.0, pytest.approx(40 / 220))
    experiment = Experiment("2", "Bias", "None.", (Variant("a"),), faster("b", "a"))
    assert "| a | – | – | – | 220 | 18 % | – | 2.0 | 0.50 | 60.00 |" in as_markdown(
        [Result(experiment, {"a": one})], []
    )


def test_every_sample_of_an_experiment_is_recorded() -> None:
    record = Recording()
    experiment = Experiment("2", "Bias", "None.", (Variant("a"), Variant("b"), Variant("c")), faster("b", "a"))
    seen = {"a": measured(100, 110, rounds=1), "b": measured(300, accuracy=60.0), "c": Measured(refusal="no GPU")}
    add_tables(record, experiment, seen)
    speed, accuracy = record.tables
    assert (speed.title, speed.base, speed.unit) == ("2 Bias", "a", "images/s")
    assert speed.samples == {"a": pytest.approx([100, 110]), "b": pytest.approx([300] * 5)}
    assert speed.missing == {"c": "no GPU"}
    assert accuracy.samples == {"a": [50.0, 50.0], "b": [60.0]}


def test_known_results_are_reused_under_the_same_conditions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = EXPERIMENTS[:2]
    stored = StoredResults(tmp_path / "results.json", ("2 cores",))
    stored.add(first, {variant.name: measured(100, 110) for variant in first.variants})
    again = StoredResults(tmp_path / "results.json", ("2 cores",))
    assert (again.is_missing(first), again.is_missing(second)) == (False, True)
    assert again.results(first) == stored.results(first)
    assert [settings for settings, _ in again.runs()] == [variant.settings for variant in first.variants]
    assert StoredResults(tmp_path / "results.json", ("4 cores",)).is_missing(first)
    assert "measured under other conditions (2 cores)" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.launch
def test_full_runs_are_made_once_and_short_runs_give_speed() -> None:
    plain, pruned, refused = (
        Variant("plain"),
        Variant("half", {"TRAIN_PRUNE_RATIO": "0.5"}),
        Variant("too large", {"TRAIN_BATCH_SIZE": "100000"}),
    )  # fmt: skip
    common = {"TRAIN_EPOCHS": "2"}
    ran = measured(1.0, accuracy=12.5)
    seen = run_to_the_end([plain, pruned, refused], common, [({}, ran)])
    assert seen["plain"].summaries == ran.summaries
    seen = with_speeds(seen, [plain, pruned, refused], {}, 3, 1)
    assert [one["steps"] for one in seen["plain"].short] == [3]
    assert seen["plain"].accuracy == 12.5
    assert seen["half"].short[0]["parameters"] == seen["half"].summaries[0]["parameters"] < 155_530
    assert seen["too large"].refusal.startswith("TRAIN_BATCH_SIZE=100000")
    assert seen["too large"].short == []
