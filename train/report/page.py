"""Write report.html: one file about a run, from the files in its folder; it needs no network and runs no script."""

from __future__ import annotations

import base64
import io
import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError

from entrypoint.core.errors import UserError, first_line, printable
from entrypoint.core.files import atomic_write_text, is_file, read_regular
from train.report.metrics import read_metrics
from train.report.stragglers import stragglers_text
from train.setting_groups.data import SCORES

REPORT_FILE, SKIPPED_FILE, BATCH_FILE = "report.html", "skipped.txt", "batch.png"
RUN_FILES = ("summary.json", "plan.json", "evaluation.json", "settings.json", "ranks.json")
# A matrix of more classes does not fit on a screen; the most frequent confusions are listed in any case.
MAX_MATRIX_CLASSES = 30
LISTED = 10

# Shares of the training time from which on something is worth a sentence.
WAITING, LOADING = 0.1, 0.1
# A test loss that rises by this factor over its best one is a sign of overfitting.
OVERFITTING = 1.2


def advise(summary: Mapping[str, Any], lines: list[dict[str, Any]]) -> list[str]:
    """Return what to change, the most effective first."""
    waited, loaded = summary.get("cpu_wait_share", 0), summary.get("data_share", 0)
    name = "val" if lines_with(lines, "epoch", "val_loss") else "test"
    losses = [line[f"{name}_loss"] for line in lines_with(lines, "epoch", f"{name}_loss")] or [0]
    rows = {
        f"Threads waited {100 * waited:.0f} % of the time for a CPU. Run on an idle node, or `entrypoint tune`.": (
            waited > WAITING
        ),
        f"Training waited {100 * loaded:.0f} % of the time for data; the slow part is"
        f" {summary.get('data_slow_part', 'loading')}. Raise TRAIN_NUM_WORKERS, or use a faster disk.": loaded
        > LOADING,
        "The best checkpoint was chosen on the test images, so its accuracy is too optimistic. TRAIN_VAL_SPLIT=0.1"
        " sets other images apart.": summary.get("best_chosen_on") == "test" and summary.get("epochs", 0) > 1,
        f"The {name} loss was lowest after epoch {losses.index(min(losses)) + 1} and rose since. Try TRAIN_AUGMENT,"
        " TRAIN_WEIGHT_DECAY or TRAIN_EARLY_STOPPING.": len(losses) > 2 and losses[-1] > OVERFITTING * min(losses) > 0,
    }
    return [text for text, holds in rows.items() if holds]


def write_report(folder: Path, so_far: Mapping[str, Any] | None = None) -> Path:
    """Write the report of a run and return its path; a run that trains has what is known `so_far` for a summary.

    Raises `UserError` for a folder that holds no finished run, or files that a run does not write: somebody else may
    have written them. Raises OSError if the page cannot be written.
    """
    summary = read_part(folder, "summary.json") if so_far is None else so_far
    path = folder / REPORT_FILE
    try:
        page = page_of(folder, summary, trains=so_far is not None)
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
        RecursionError,
        TemplateError,
    ) as error:
        raise UserError(
            f"{printable(folder)}: {', '.join(RUN_FILES)}: one of them is not what a run writes"
            f" ({printable(first_line(error))}). Remove it."
        ) from None
    atomic_write_text(path, page)
    return path


def read_run_file(folder: Path, name: str) -> Any:
    """Return the content of a JSON file of a run, None without one; raises `UserError` for another content."""
    path = folder / name
    if not is_file(path):
        return None
    try:
        return json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{printable(path)}: is not what a run writes ({printable(str(error))}). Remove it.") from None


def read_part(folder: Path, name: str) -> dict[str, Any]:
    """Return a JSON object of a finished run; raises `UserError` without one."""
    content = read_run_file(folder, name)
    if not isinstance(content, dict):
        raise UserError(f"{printable(folder)}: holds no finished run, as it has no {name}. Name a run folder.")
    return content


def page_of(folder: Path, summary: Mapping[str, Any], *, trains: bool = False) -> str:
    """Return the page of a run, which a browser loads again every half a minute while it `trains`."""
    plan, evaluation = read_run_file(folder, "plan.json") or {}, read_run_file(folder, "evaluation.json") or {}
    settings = read_run_file(folder, "settings.json") or {}
    lines = read_metrics(folder)
    classes, confusion = evaluation.get("classes") or [], evaluation.get("confusion") or []
    batch, skipped = folder / BATCH_FILE, folder / SKIPPED_FILE
    left_out = read_regular(skipped).splitlines() if is_file(skipped) else []
    more = [f"and {len(left_out) - LISTED:,} more in {SKIPPED_FILE}"] if len(left_out) > LISTED else []
    scores = (evaluation.get("class_accuracy") or {}).items()
    known = sorted((share, name) for name, share in scores if share is not None)
    return render(
        "report.html.jinja",
        name=folder.resolve().name,
        trains=trains,
        summary=summary,
        shown=[(key, value_text(value)) for key, value in summary.items() if key != "stragglers"],
        advice=advise(summary, lines),
        plots=drawings(plots_of(lines)),
        confidence=drawings(confidence_plots(evaluation) | feature_plot(evaluation), ""),
        batch=base64.b64encode(batch.read_bytes()).decode() if is_file(batch) else "",
        skipped=[*left_out[:LISTED], *more],
        mistakes=[one for one in evaluation.get("mistakes") or [] if one.get("png")],
        evaluation=evaluation,
        worst=[(name, f"{share:.2f} %") for share, name in known[:LISTED]],
        confused=most_confused(classes, confusion),
        matrix=list(zip(classes, confusion, strict=True)) if confusion and len(classes) <= MAX_MATRIX_CLASSES else [],
        plan=plan,
        decisions=[(one.get("key"), one.get("value"), one.get("reason")) for one in plan.get("decisions") or []],
        ranks=read_run_file(folder, "ranks.json") or [],
        settings=[(f"TRAIN_{key.upper()}", value_text(value)) for key, value in settings.items()],
    )


def render(template: str, **values: Any) -> str:
    """Return a page with these values in its template."""
    loader = FileSystemLoader(Path(__file__).parent)
    pages = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    pages.filters |= {"text": value_text, "stragglers": stragglers_text}
    page = pages.get_template(template).render(**values)
    return page.encode("utf-8", "backslashreplace").decode()  # file names may be no UTF-8


def value_text(value: Any) -> str:
    """Return a JSON value as one line."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 400 else f"{text[:400]}…"


def most_confused(classes: Sequence[str], confusion: Sequence[Sequence[int]]) -> list[tuple[str, int]]:
    """Return the most frequent confusions of two classes with their numbers."""
    pairs = (
        (count, classes[row], classes[column])
        for row, counts in enumerate(confusion)
        for column, count in enumerate(counts)
        if row != column and count
    )
    return [(f"{label} → {other}", count) for count, label, other in sorted(pairs, reverse=True)[:LISTED]]


def lines_with(lines: list[dict[str, Any]], kind: str, *fields: str) -> list[dict[str, Any]]:
    """Return the lines of a kind that have a number in each field; Python's integers may be of any size."""
    return [
        line
        for line in lines
        if line["kind"] == kind
        and all(isinstance(value := line.get(field), int | float) and not abs(value) > MAX_INT for field in fields)
    ]


MAX_INT = 2**63
Curve = tuple[list[float], list[float]]


# Drawn from 0 on, and as points.
SPEED, FEATURES = "images/s", "test images by their features"
BEHIND_NAMES = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0}


def curve_of(lines: list[dict[str, Any]], field: str) -> Curve:
    """Return the epochs of some lines, and the values of a field."""
    return [line["epoch"] for line in lines], [line[field] for line in lines]


def plots_of(lines: list[dict[str, Any]]) -> dict[str, dict[str, Curve]]:
    """Return the curves by title and label, of metrics.jsonl's lines: nothing if a curve would be one point.

    Why nothing: drawing imports matplotlib, which takes long.
    """
    name = "val" if lines_with(lines, "epoch", "val_loss") else "test"
    scores = (score for score in SCORES.values() if lines_with(lines, "epoch", f"{name}_{score}"))
    score = next(scores, SCORES["classify"])
    steps = lines_with(lines, "step", "epoch", "loss", "images_per_second")
    epochs = lines_with(lines, "epoch", "epoch", f"{name}_loss", f"{name}_{score}")
    if max(len(steps), len(epochs)) < 2:
        return {}
    return {
        "loss": {"train": curve_of(steps, "loss"), name: curve_of(epochs, f"{name}_loss")},
        f"{name} {score}, %": {name: curve_of(epochs, f"{name}_{score}")},
        SPEED: {"train": curve_of(steps, "images_per_second")},
    }


def confidence_plots(evaluation: Mapping[str, Any]) -> dict[str, dict[str, Curve]]:
    """Return how often answers are right by how sure the model is, and precision by recall; nothing for numbers."""
    calibration, curve = evaluation.get("calibration"), evaluation.get("precision_recall")
    if not calibration or not curve:
        return {}
    ideal = ([0.0, 1.0], [0.0, 1.0])
    shares, right, _ = map(list, zip(*calibration, strict=True))
    recall, precision = map(list, zip(*curve, strict=True))
    return {
        "right answers by probability": {"this model": (shares, right), "ideal": ideal},
        "precision by recall": {"this model": (recall, precision)},
    }


def feature_plot(evaluation: Mapping[str, Any]) -> dict[str, dict[str, Curve]]:
    """Return where the features of some test images are, by class; nothing without any."""
    places = {name: list(zip(*rows, strict=True)) for name, rows in (evaluation.get("features") or {}).items() if rows}
    return {FEATURES: {name: (list(xs), list(ys)) for name, (xs, ys) in places.items()}} if places else {}


@contextmanager
def without_messages() -> Iterator[None]:
    """Keep matplotlib from printing: that it lists the fonts, and which letters its font lacks."""
    logger = logging.getLogger("matplotlib.font_manager")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph", UserWarning)
            yield
    finally:
        logger.setLevel(before)


@without_messages()
def drawings(plots: Mapping[str, Mapping[str, Curve]], below: str = "epoch") -> list[str]:
    """Return curves by title and label as drawings in a page, with a text below each."""
    return [drawing(title, curves, below) for title, curves in plots.items()]


def drawing(title: str, curves: Mapping[str, Curve], below: str) -> str:
    """Return one drawing as SVG, without the prologue of a file of its own."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    figure = Figure(figsize=(4.2, 3))
    FigureCanvasSVG(figure)
    axes = figure.subplots()
    is_cloud = title == FEATURES
    for name, (across, up) in curves.items():
        (line,) = axes.plot(across, up, "o" if is_cloud else "o-" if len(across) < 40 else "-", ms=3, lw=1)
        if is_cloud:  # a legend would hide a part of it
            axes.text(fmean(across), fmean(up), name[:16], color=line.get_color(), weight="bold", bbox=BEHIND_NAMES)
    axes.set_title(title)
    axes.set_xlabel(below)
    axes.grid(alpha=0.3)
    if title == SPEED:
        axes.set_ylim(bottom=0)
    if len(curves) > 1 and not is_cloud:
        axes.legend(axes.lines, list(curves), loc="upper right" if below else "upper left")  # "best" is slow
    figure.subplots_adjust(left=0.16, right=0.97, bottom=0.17, top=0.9)
    out = io.StringIO()
    for text in figure.findobj(Text):
        text.set_parse_math(False)  # names of runs have any letters
    with mpl.rc_context({"svg.hashsalt": title, "svg.fonttype": "none"}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return out.getvalue()[out.getvalue().index("<svg") :]
