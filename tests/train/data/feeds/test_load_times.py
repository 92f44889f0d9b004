"""What the summary says about the time to load batches."""

from __future__ import annotations

import pytest

from train.data.feeds.load_times import MAX_THREADS, LoadTimes


@pytest.mark.parametrize(
    ("read_s", "decode_s", "files", "threads"),
    [
        (0.0, 1.0, 1000, 2),
        (0.1, 1.0, 1000, 2),  # reading is quick
        (1.0, 1.0, 1000, 4),
        (9.0, 1.0, 1000, 20),
        (1000.0, 1.0, 1000, MAX_THREADS),
        (9.0, 1.0, 10, 2),  # too few to know
    ],
)
def test_threads_grow_with_the_time_to_read(read_s: float, decode_s: float, files: int, threads: int) -> None:
    times = LoadTimes()
    times.add(read_s, decode_s, files)
    assert times.threads_to_keep_busy(2) == threads


@pytest.mark.parametrize(
    ("times", "threads", "said"),
    [
        (LoadTimes(1.0, 2.0, wait_s=3.0, copy_s=1.0, files=1000), 2, "40 % of the training, mostly decoding; 2 work"),
        (LoadTimes(2.0, 1.0, wait_s=3.0, copy_s=1.0, files=1000), 8, "40 % of the training, mostly reading files; 8 w"),
        (LoadTimes(2.0, 1.0, wait_s=0.1, copy_s=0.9, files=1000), 2, "10 % of the training, mostly transforms and cop"),
        (LoadTimes(2.0, 1.0, files=1000), 8, "8 workers, 2.0 ms to read a file, 1.0 ms to decode it"),
        (LoadTimes(1.0, 2.0, wait_s=0.3, files=1000), 2, ""),
        (LoadTimes(), 2, ""),
    ],
)
def test_report_names_the_slow_part(times: LoadTimes, threads: int, said: str) -> None:
    text = times.report(10.0, threads).text(2)
    assert text.startswith(said)
    assert bool(text) is bool(said)


def test_report_of_no_training_is_no_division_by_zero() -> None:
    assert LoadTimes(wait_s=1.0).report(0.0, 2).share == 0
