"""Program of `entrypoint report` and `entrypoint compare`: pages and tables of finished runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from entrypoint.core.console import report_error
from entrypoint.core.errors import ExitCode, UserError, one_line, printable
from train.checkpoint.metadata import write_error
from train.report.page import read_part, value_text, write_report
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
            print(one_line(write_report(folder)))
        except OSError as error:
            raise write_error(folder, error) from None


def compare_command(words: Sequence[str]) -> None:
    """Print the results of runs side by side, and the settings in which they differ; raises `UserError`."""
    names = [printable(Path(word).name) for word in words]
    summaries, settings = (
        [read_part(Path(word), name) for word in words] for name in ("summary.json", "settings.json")
    )
    rows = [(key, [value_text(one[key]) if key in one else "-" for one in summaries]) for key in RESULTS]
    rows = [(key, values) for key, values in rows if set(values) != {"-"}]
    differing = [
        (f"TRAIN_{key.upper()}", [value_text(one.get(key)) for one in settings])
        for key in sorted({name for one in settings for name in one})
        if len({value_text(one.get(key)) for one in settings}) > 1 and key != "run_name"
    ]
    print_table(names, rows)
    if differing:
        print("\nsettings that differ")
        print_table(names, differing)


def print_table(names: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> None:
    """Print rows of values under the runs' names."""
    table = [("", *names), *((key, *(one_line(value) for value in values)) for key, values in rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def main() -> int:
    """Run the command on the command line; return the exit code."""
    command, *words = sys.argv[1:]
    try:
        (report_command if command == "report" else compare_command)(words)
    except UserError as error:
        return report_error(error)
    except BrokenPipeError:
        pass
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main())
