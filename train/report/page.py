"""Write report.html: one file about a run, from the files in its folder; it needs no network and runs no script."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from entrypoint.core.atomic_files import atomic_write_text
from entrypoint.core.errors import UserError, first_line, printable
from entrypoint.core.paths import is_file, read_regular
from train.report.curves import Plot, lines_with, plots_of, without_messages
from train.report.metrics import read_metrics
from train.report.stragglers import stragglers_text

REPORT_FILE, SKIPPED_FILE, BATCH_FILE = "report.html", "skipped.txt", "batch.png"
RUN_FILES = ("summary.json", "plan.json", "evaluation.json", "settings.json", "ranks.json")
RELOADING = '<meta http-equiv="refresh" content="30">'
# A matrix of more classes does not fit on a screen; the most frequent confusions are listed in any case.
MAX_MATRIX_CLASSES = 30
LISTED = 10
# Colors of the confusion matrix; the share of a class decides how strong they are.
RIGHT, WRONG = "#22aa77", "#cc4433"
STYLE = """
:root{color-scheme:light dark;--line:#8885;--soft:#8882;--good:#2a7;--bad:#c43}
*{box-sizing:border-box}
body{font:15px/1.5 system-ui,sans-serif;margin:0 auto;padding:1rem;max-width:70rem}
h1,td,li,figcaption,.facts{overflow-wrap:anywhere}th{white-space:nowrap}
h1{font-size:1.5rem;margin:.2rem 0}h2{font-size:1.1rem;margin:2rem 0 .5rem;border-bottom:1px solid var(--line)}
.facts{display:flex;flex-wrap:wrap;gap:.6rem;margin:1rem 0}
.facts div{flex:1 1 8rem;background:var(--soft);border-radius:.5rem;padding:.6rem .8rem}
.facts b{display:block;font-size:1.3rem}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{text-align:left;vertical-align:top;padding:.15rem .8rem .15rem 0}
.matrix th,.matrix td{padding:.1rem .35rem;text-align:right;font-size:.8rem;border:1px solid var(--soft)}
.plots{display:flex;flex-wrap:wrap;gap:1rem}.plots svg{flex:1 1 18rem;max-width:100%;height:auto;background:#fff}
.gallery{display:flex;flex-wrap:wrap;gap:.8rem}
figure{margin:0;width:7rem;font-size:.8rem}figure img{width:7rem;image-rendering:auto;border-radius:.3rem}
.batch{max-width:100%;height:auto}
pre{overflow-x:auto;background:var(--soft);padding:.6rem;border-radius:.3rem}
li.advice{margin:.3rem 0}
"""


# Shares of the training time from which on something is worth a sentence.
WAITING, LOADING = 0.1, 0.1
# A test loss that rises by this factor over its best one is a sign of overfitting.
OVERFITTING = 1.2


def advise(summary: Mapping[str, Any], plan: Mapping[str, Any], lines: list[dict[str, Any]]) -> list[str]:
    """Return what to change, the most effective first."""
    advice = []
    if summary.get("cpu_wait_share", 0) > WAITING:
        advice.append(
            f"Threads waited {100 * summary['cpu_wait_share']:.0f} % of the time for a CPU. Run on an idle node, or"
            " `entrypoint tune`."
        )
    if summary.get("data_share", 0) > LOADING:
        advice.append(
            f"Training waited {100 * summary['data_share']:.0f} % of the time for data; the slow part is"
            f" {summary.get('data_slow_part', 'loading')}. Raise TRAIN_NUM_WORKERS, or use a faster disk."
        )
    if summary.get("best_chosen_on") == "test" and summary.get("epochs", 0) > 1:
        advice.append(
            "The best checkpoint was chosen on the test images, so its accuracy is too optimistic. TRAIN_VAL_SPLIT=0.1"
            " sets other images apart."
        )
    name = "val" if lines_with(lines, "epoch", "val_loss") else "test"
    losses = [line[f"{name}_loss"] for line in lines_with(lines, "epoch", f"{name}_loss")]
    if len(losses) > 2 and min(losses) > 0 and losses[-1] > OVERFITTING * min(losses):
        epoch = losses.index(min(losses)) + 1
        advice.append(
            f"The {name} loss was lowest after epoch {epoch} and rose since. Try TRAIN_AUGMENT, TRAIN_WEIGHT_DECAY or"
            " TRAIN_EARLY_STOPPING."
        )
    if summary.get("images_skipped"):
        advice.append(f"{summary['images_skipped']:,} images could not be read and were left out.")
    if (plan.get("trainer") or {}).get("auto_selects_bf16"):
        advice.append("This machine computes in bf16: TRAIN_PRECISION=auto is faster here.")
    return advice


def write_report(folder: Path, so_far: Mapping[str, Any] | None = None) -> Path:
    """Write the report of a run and return its path; a run that trains has what is known `so_far` for a summary.

    Raises `UserError` for a folder that holds no finished run, or files that a run does not write: somebody else may
    have written them. Raises OSError if the page cannot be written.
    """
    summary = read_part(folder, "summary.json") if so_far is None else so_far
    path = folder / REPORT_FILE
    try:
        page = page_of(folder, summary, trains=so_far is not None)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise UserError(
            f"{printable(folder)}: {', '.join(RUN_FILES)}: one of them is not what a run writes"
            f" ({printable(first_line(error))}). Remove it."
        ) from None
    atomic_write_text(path, page.encode("utf-8", "backslashreplace").decode())  # file names may be no UTF-8
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
    settings, ranks = read_run_file(folder, "settings.json") or {}, read_run_file(folder, "ranks.json") or []
    lines = read_metrics(folder) if is_file(folder / "metrics.jsonl") else []
    name = escape(folder.resolve().name)
    sections = [
        section("What to change", list_of(advise(summary, plan, lines))),
        section("Curves", plots(lines)),
        section("A training batch, as the network sees it", batch_image(folder)),
        section("Surest mistakes", gallery(evaluation.get("mistakes") or [])),
        section("Images left out", skipped_list(folder)),
        section("Classes", classes_table(evaluation)),
        section("Confusion matrix", matrix(evaluation)),
        section("Stragglers", stragglers_table(summary.get("stragglers") or {})),
        section("Summary", table((key, value_text(value)) for key, value in summary.items() if key != "stragglers")),
        section("Plan", plan_table(plan)),
        section("Ranks as they were", ranks_table(ranks)),
        section("Settings", table((f"TRAIN_{key.upper()}", value_text(value)) for key, value in settings.items())),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<link rel="icon" href="data:,">{RELOADING if trains else ""}'
        f"<title>{name}</title><style>{STYLE}</style></head><body><h1>{name}</h1>"
        f"{facts(summary)}{''.join(sections)}</body></html>\n"
    )


def section(title: str, content: str) -> str:
    """Return a section of the page, nothing without content."""
    return f"<section><h2>{escape(title)}</h2>{content}</section>" if content else ""


def facts(summary: Mapping[str, Any]) -> str:
    """Return the most important numbers."""
    score = summary.get("score", "accuracy")
    shown = [
        (f"test {score}", percent(summary.get(f"test_{score}"))),
        (f"best on {summary.get('best_chosen_on', 'test')}", percent(summary.get(f"best_{score}"))),
        ("images/s", f"{summary.get('images_per_second', 0):,.0f}"),
        ("training", f"{summary.get('train_seconds', 0):,.1f} s"),
        ("epochs", f"{summary.get('epochs', 0):,}"),
        ("parameters trained", parameters_text(summary)),
        ("ranks", f"{summary.get('world_size', 1)} × {summary.get('device', '')}"),
    ]
    return (
        f'<div class="facts">{"".join(f"<div>{escape(key)}<b>{escape(text)}</b></div>" for key, text in shown)}</div>'
    )


def parameters_text(summary: Mapping[str, Any]) -> str:
    """Return how many parameters were trained, in millions from one million on, and of how many."""
    trained, whole = summary.get("parameters", 0), summary.get("all_parameters", 0)
    return millions(trained) if whole in (0, trained) else f"{millions(trained)} of {millions(whole)}"


def millions(count: int) -> str:
    """Return a number that fits into a tile."""
    return f"{count / 10**6:,.1f} M" if count >= 10**6 else f"{count:,}"


def percent(value: Any) -> str:
    """Return a percentage, a dash where it is unknown."""
    return f"{value:.2f} %" if isinstance(value, (int, float)) else "–"


def value_text(value: Any) -> str:
    """Return a JSON value as one line."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 400 else f"{text[:400]}…"


def table(rows: Iterable[Sequence[str]]) -> str:
    """Return a table whose first column names each row."""
    made = "".join(
        f"<tr><th>{escape(str(first))}</th>{''.join(f'<td>{escape(str(one))}</td>' for one in rest)}</tr>"
        for first, *rest in rows
    )
    return f'<div class="wide"><table>{made}</table></div>' if made else ""


def list_of(items: Sequence[str]) -> str:
    """Return a list, nothing without items."""
    return f"<ul>{''.join(f'<li class=advice>{escape(one)}</li>' for one in items)}</ul>" if items else ""


def batch_image(folder: Path) -> str:
    """Return the image of a training batch, nothing where there is none."""
    if not is_file(folder / BATCH_FILE):
        return ""
    data = base64.b64encode((folder / BATCH_FILE).read_bytes()).decode()
    return f'<img class="batch" alt="images of a training batch" src="data:image/png;base64,{data}">'


def skipped_list(folder: Path) -> str:
    """Return the first images that could not be read, and how many more there are."""
    if not is_file(folder / SKIPPED_FILE):
        return ""
    lines = read_regular(folder / SKIPPED_FILE).splitlines()
    more = [f"and {len(lines) - LISTED:,} more in {SKIPPED_FILE}"] if len(lines) > LISTED else []
    return list_of([*lines[:LISTED], *more])


def plan_table(plan: Mapping[str, Any]) -> str:
    """Return the decisions of the plan with their reasons, its warnings, and the map of ranks on cores."""
    decisions = plan.get("decisions") or []
    core_map = (plan.get("binding") or {}).get("core_map") or []
    rows = [(str(one.get("key")), str(one.get("value")), str(one.get("reason"))) for one in decisions]
    cores = f"<pre>{escape(chr(10).join(map(str, core_map)))}</pre>" if core_map else ""
    return list_of([str(one) for one in plan.get("warnings") or []]) + table(rows) + cores


def ranks_table(ranks: Sequence[Mapping[str, Any]]) -> str:
    """Return what each rank had when it started."""
    if not ranks:
        return ""
    names = list(ranks[0])
    return table(
        [("", *names), *((str(row), *(value_text(one.get(name)) for name in names)) for row, one in enumerate(ranks))]
    )


def stragglers_table(found: dict[str, Any]) -> str:
    """Return where the time of each rank's steps goes, and which rank or node costs how much."""
    ranks = found.get("ranks") or []
    text = stragglers_text(found) or "No rank is much slower than the others."
    return f"<p>{escape(text)}</p>{ranks_table(ranks)}" if ranks else ""


def gallery(mistakes: Sequence[Mapping[str, Any]]) -> str:
    """Return the surest mistakes as images with both classes."""
    made = [
        f'<figure><img alt="" src="data:image/png;base64,{escape(str(one["png"]))}">'
        f"<figcaption>{escape(str(one['class']))}, predicted {escape(str(one['predicted']))}"
        f" ({100 * one['probability']:.0f} %)</figcaption></figure>"
        for one in mistakes
        if one.get("png")
    ]
    return f'<div class="gallery">{"".join(made)}</div>' if made else ""


def classes_table(evaluation: Mapping[str, Any]) -> str:
    """Return the classes with the lowest accuracy, and the most frequent confusions."""
    known = {name: share for name, share in (evaluation.get("class_accuracy") or {}).items() if share is not None}
    worst = sorted(known.items(), key=lambda item: item[1])[:LISTED]
    classes, confusion = evaluation.get("classes") or [], evaluation.get("confusion") or []
    pairs = sorted(
        (
            (count, classes[row], classes[column])
            for row, counts in enumerate(confusion)
            for column, count in enumerate(counts)
            if row != column and count
        ),
        reverse=True,
    )[:LISTED]
    return table(
        [(f"lowest {evaluation.get('score', 'accuracy')}", ""), *((name, f"{share:.2f} %") for name, share in worst)]
        if worst
        else []
    ) + table(
        [("most frequent confusions", ""), *((f"{own} → {other}", str(count)) for count, own, other in pairs)]
        if pairs
        else []
    )


def matrix(evaluation: Mapping[str, Any]) -> str:
    """Return the confusion matrix: a row for each class, a column for each predicted class."""
    classes, confusion = evaluation.get("classes") or [], evaluation.get("confusion") or []
    if not confusion or len(classes) > MAX_MATRIX_CLASSES:
        return ""
    head = "".join(f"<th>{escape(name)}</th>" for name in classes)
    rows = []
    for row, (name, counts) in enumerate(zip(classes, confusion, strict=True)):
        total = max(1, sum(counts))
        cells = "".join(
            f'<td style="background:{RIGHT if row == column else WRONG}{round(200 * count / total):02x}">{count}</td>'
            for column, count in enumerate(counts)
        )
        rows.append(f"<tr><th>{escape(name)}</th>{cells}</tr>")
    return f'<div class="wide"><table class="matrix"><tr><th></th>{head}</tr>{"".join(rows)}</table></div>'


@without_messages()
def plots(lines: list[dict[str, Any]]) -> str:
    """Return loss, accuracy and throughput over the epochs as drawings in the page."""
    drawings = "".join(map(drawing, plots_of(lines)))
    return f'<div class="plots">{drawings}</div>' if drawings else ""


def drawing(plot: Plot) -> str:
    """Return one drawing as SVG, without the prologue of a file of its own."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2, 3))
    FigureCanvasSVG(figure)
    plot.draw(figure.subplots())
    figure.subplots_adjust(left=0.16, right=0.97, bottom=0.17, top=0.9)
    out = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": plot.title, "svg.fonttype": "none"}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return out.getvalue()[out.getvalue().index("<svg") :]
