"""Program of `entrypoint report`, `compare` and `runs`: pages and tables of runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from entrypoint.core.console import report_error, write_stdout
from entrypoint.core.errors import ExitCode, UserError, first_line, one_line, printable
from entrypoint.core.files import atomic_write_text, is_file
from train.checkpoint.folder import FOLDER, list_newest_first
from train.checkpoint.metadata import write_error
from train.lock_file import LOCK_NAME, STALE_S
from train.report.metrics import read_metrics
from train.report.page import Curve, drawings, plots_of, read_part, read_run_file, render, value_text, write_report
from train.setting_groups.data import SCORES

# What is compared of a summary, in this order.
RESULTS = (
    *(f"{part}_{score}" for score in SCORES.values() for part in ("test", "best", "val")),
    *("best_chosen_on", "test_loss", "epochs", "steps"),
    *("train_seconds", "total_seconds", "images_per_second", "step_seconds", "parameters", "world_size", "device"),
    *("threads", "precision", "cpu_wait_share", "data_share"),
)


def report_command(words: Sequence[str]) -> None:
    """Write the report of each run and print its path; raises `UserError`."""
    for word in words:
        folder = Path(word)
        try:
            page = write_report(folder)
        except OSError as error:
            raise write_error(folder, error) from None
        write_stdout(one_line(page))


def compare_command(words: Sequence[str]) -> None:
    """Print the results of runs side by side, and the settings in which they differ; raises `UserError`.

    A page next to the first run has them too, with the curves of all runs.
    """
    names = [printable(Path(word).name) for word in words]
    names = names if len(set(names)) == len(names) else [printable(word) for word in words]
    settings = [read_part(Path(word), "settings.json") for word in words]
    summaries = [
        read_part(Path(word), "summary.json") if is_file(Path(word) / "summary.json") else {} for word in words
    ]
    rows = [(key, [value_text(one[key]) if key in one else "-" for one in summaries]) for key in RESULTS]
    rows = [(key, values) for key, values in rows if set(values) != {"-"}]
    differing = [
        (f"TRAIN_{key.upper()}", [value_text(one.get(key)) for one in settings])
        for key in sorted({name for one in settings for name in one})
        if len({value_text(one.get(key)) for one in settings}) > 1 and key != "run_name"
    ]
    print_table(names, rows)
    if differing:
        write_stdout("\nsettings that differ")
        print_table(names, differing)
    plots: dict[str, dict[str, Curve]] = {}
    for name, word in zip(names, words, strict=True):
        for title, curves in plots_of(read_metrics(Path(word))).items():
            for label, curve in curves.items():
                plots.setdefault(title if len(curves) == 1 else f"{label} {title}", {})[name] = curve
    page = Path(words[0]).parent / "compare.html"
    content = render("compare.html.jinja", names=names, rows=rows, differing=differing, plots=drawings(plots))
    try:
        atomic_write_text(page, content)
    except OSError as error:
        raise write_error(page, error) from None
    write_stdout(f"\n{one_line(page)}")


def runs_command(words: Sequence[str]) -> None:
    """Print the runs of a folder, the newest first; raises `UserError` for a folder that cannot be read."""
    folder = Path(words[0] if words else "runs")
    try:
        below = (path for path in folder.iterdir() if not path.is_symlink())
        runs = [path for path in (folder, *below) if is_file(path / "settings.json")]
    except OSError as error:
        raise UserError(f"{printable(folder)}: {error.strerror}. Name a folder of runs.") from None
    runs.sort(key=lambda path: (path / "settings.json").stat().st_mtime, reverse=True)
    print_table(
        ("state", "score", "epochs", "minutes", "model", "dataset"), [(path.name, row_of(path)) for path in runs]
    )


def row_of(folder: Path) -> list[str]:
    """Return the state of a run, its score on the test images (or the last one on others), epochs and minutes."""
    try:
        settings, summary = read_part(folder, "settings.json"), read_run_file(folder, "summary.json") or {}
        epochs = [line for line in read_metrics(folder) if line["kind"] == "epoch"]
        known = dict(summary) or {"epochs": len(epochs), **(epochs[-1] if epochs else {})}
        name = next((key for key in RESULTS if key in known and key.partition("_")[2] in SCORES.values()), "")
        score = f"{known[name]:.2f} % {name.partition('_')[0]}" if name else "-"
        minutes = f"{known['total_seconds'] / 60:.1f}" if "total_seconds" in known else "-"
    except (UserError, OSError, ArithmeticError, LookupError, TypeError, ValueError) as error:  # files may be anybody's
        return ["damaged", "-", "-", "-", "-", first_line(error)]
    values = known["epochs"], minutes, settings.get("model", "-"), settings.get("dataset", "-")
    return [state_of(folder, finished=bool(summary)), score, *map(value_text, values)]


def state_of(folder: Path, *, finished: bool) -> str:
    """Return what a run does: its lock is touched while it trains, also after it has finished before."""
    lock = folder / LOCK_NAME
    if is_file(lock) and time.time() - lock.stat().st_mtime < STALE_S:
        return "trains"
    if finished:
        return "finished"
    return "unfinished" if list_newest_first(folder / FOLDER) else "failed"


def print_table(names: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> None:
    """Print rows of values under the runs' names."""
    table = [("", *names), *((key, *(one_line(value) for value in values)) for key, values in rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = ("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in table)
    write_stdout("\n".join(line.rstrip() for line in lines))


COMMANDS = {"report": report_command, "compare": compare_command, "runs": runs_command}


def main() -> int:
    """Run the command on the command line; return the exit code."""
    command, *words = sys.argv[1:]
    try:
        COMMANDS[command](words)
    except UserError as error:
        return report_error(error)
    except BrokenPipeError:
        pass
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main())
