"""Freed memory goes back to the kernel, and not more often than once a minute."""

from __future__ import annotations

import os
import subprocess
import textwrap

import pytest

from entrypoint.plan.runtime_libraries import GLIBC_TUNABLES_VALUE
from tests.conftest import LAUNCH_LIMIT_S, PYTHON
from train.acceleration.torch_workarounds import TRIM_INTERVAL_S, HeapTrimmer


@pytest.mark.parametrize(
    ("seconds", "trimmed"),
    [([1.0, TRIM_INTERVAL_S - 1], []), ([TRIM_INTERVAL_S, TRIM_INTERVAL_S + 1], [TRIM_INTERVAL_S])],
)
def test_heap_is_trimmed_once_per_interval(seconds: list[float], trimmed: list[float]) -> None:
    now = [0.0]
    heap = HeapTrimmer(lambda: now[0])
    found: list[float] = []
    heap.malloc_trim = lambda _: found.append(now[0])
    for now[0] in seconds:
        heap.trim_if_due()
    assert found == trimmed


# Frees 200 MB with a block in use after every 2 MB, and prints the resident MiB before and after.
FREE_WITH_HOLES = """
    import re, sys
    from pathlib import Path
    from train.acceleration.torch_workarounds import HeapTrimmer

    def resident_mib():
        return int(re.search(r"VmRSS: +([0-9]+)", Path("/proc/self/status").read_text().replace("\\t", " "))[1]) // 1024

    now = [0.0]
    heap = HeapTrimmer(lambda: now[0])
    blocks = [bytes([1]) * 100_000 for _ in range(2000)]
    kept = blocks[::20]
    del blocks
    before = resident_mib()
    now[0] = float(sys.argv[1])
    heap.trim_if_due()
    print(before - resident_mib())
"""


@pytest.mark.launch
@pytest.mark.parametrize(("seconds", "least", "most"), [(0, -5, 5), (3600, 150, 200)])
def test_trim_returns_pages_between_used_blocks(seconds: int, least: int, most: int) -> None:
    command = [PYTHON, "-c", textwrap.dedent(FREE_WITH_HOLES), str(seconds)]
    environment = {**os.environ, "GLIBC_TUNABLES": GLIBC_TUNABLES_VALUE}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LAUNCH_LIMIT_S, check=True, env=environment)
    assert least <= int(done.stdout) <= most
