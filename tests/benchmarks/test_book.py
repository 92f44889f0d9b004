"""The book's experiments: what the report makes of what was seen, and one experiment for real."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.book.experiments import EXPERIMENTS, Experiment, Variant, faster, fewer_parameters, worse_with_ranks
from benchmarks.book.measure import Measured, alternate, link_first_images, run_to_the_end, with_speeds
from benchmarks.book.report import Result, as_html, as_markdown
from benchmarks.book.stored_results import StoredResults
from entrypoint.settings import read_launch_settings
from tests.conftest import paint
from train.settings import read_train_settings


def measured(*speeds: float, accuracy: float = 50.0, parameters: int = 100) -> Measured:
    return Measured(
        [
            {
                "batch_size": 64, "step_seconds": 64 / speed, "test_accuracy": accuracy, "train_seconds": 2.0,
                "first_step_seconds": 0.5, "parameters": parameters,
            }
            for speed in speeds
        ]
    )  # fmt: skip


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
    one = measured(100, 120, 90)
    assert (one.speed, one.spread) == (pytest.approx(100), pytest.approx(0.3))
    seen = {"whole": measured(100, parameters=1000), "half": measured(150, accuracy=49.0, parameters=500)}
    assert fewer_parameters(seen) == "Of 1,000: 500 parameters, 1.50 times as fast, -1.00 points."


def test_table_row_has_figures_ratios_and_missing_reasons() -> None:
    variants = (Variant("a", {}, 183, 82.98), Variant("b", {}, 76, 80.01), Variant("c"))
    experiment = Experiment("2", "Batch size", "256 is faster than 64.", variants, faster("b", "a"), "images/s")
    result = Result(experiment, {"a": measured(100, 110), "b": measured(300), "c": Measured(refusal="no GPU <here>")})
    text = as_markdown([result], ["2 cores"])
    assert "| b | 76 | 2.41 | 80.01 | 300 | – | 2.86 | 2.0 | 0.50 | 50.00 |" in text
    assert "| c | no GPU <here> |" in text
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
        *("2", "3.1", "3.2", "4", "5", "6.1", "7"), *("9.1", "9.2", "10.2", "11")
    }  # fmt: skip


def test_link_first_images_takes_first_of_each_class(tmp_path: Path) -> None:
    for part in ("train", "test"):
        paint(tmp_path / "all" / part, classes=2, each=8)
    link_first_images(tmp_path / "all", tmp_path / "some", 4)
    assert len(list((tmp_path / "some/train/class1").iterdir())) == 4
    assert len(list((tmp_path / "some/test/class0").iterdir())) == 1


def test_speed_from_short_runs_and_accuracy_from_full_runs() -> None:
    one = measured(100, accuracy=60.0)
    one.short = measured(200, 220, 240, accuracy=10.0).summaries
    assert (one.speed, one.accuracy, one.spread) == (pytest.approx(220), 60.0, pytest.approx(40 / 220))
    experiment = Experiment("2", "Bias", "None.", (Variant("a"),), faster("b", "a"))
    assert "| a | – | – | – | 220 | 18 % | 1.00 | 2.0 | 0.50 | 60.00 |" in as_markdown(
        [Result(experiment, {"a": one})], []
    )


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
    seen = with_speeds(seen, [plain, pruned, refused], {}, 3, 2)
    assert [one["steps"] for one in seen["plain"].short] == [3, 3]
    assert seen["plain"].accuracy == 12.5
    assert seen["half"].short[0]["parameters"] == seen["half"].summaries[0]["parameters"] < 155_530
    assert seen["too large"].refusal.startswith("TRAIN_BATCH_SIZE=100000")
    assert seen["too large"].short == []


@pytest.mark.launch
def test_variants_alternate_and_a_refused_one_keeps_its_error() -> None:
    variants = [Variant("plain"), Variant("too large", {"TRAIN_BATCH_SIZE": "100000"})]
    seen = alternate(variants, {"TRAIN_EPOCHS": "1"}, 2)
    assert [summary["seed"] for summary in seen["plain"].summaries] == [0, 1]
    assert seen["plain"].speed > 0
    refused = seen["too large"]
    assert refused.summaries == []
    assert refused.refusal.startswith("TRAIN_BATCH_SIZE=100000: larger than the training set")
