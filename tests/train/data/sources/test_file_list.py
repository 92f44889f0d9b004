"""Paths in two buffers: every name comes back, and a forked worker that reads them copies no pages."""

from __future__ import annotations

import os
import subprocess
import textwrap
from pathlib import Path

import pytest

from tests.conftest import LAUNCH_LIMIT_S, PYTHON
from train.data.sources.image_file import FileList

NAMES = ("a/1.png", "a/sub/2.png", "ü/ß.jpg", "b/line\nbreak.png", os.fsdecode(b"b/\xff\xfe.png"), "b/ .png")


@pytest.mark.parametrize("folder", [Path("train"), Path("/data/train"), Path("../änderung/train"), Path(), Path("/")])
def test_file_list_returns_the_paths_it_was_given(folder: Path) -> None:
    files = FileList(folder)
    for name in NAMES:
        files.append(folder / name)
    assert len(files) == len(NAMES)
    assert list(files) == [folder / name for name in NAMES]
    assert [files.relative(row) for row in range(len(NAMES))] == list(NAMES)
    assert files[len(NAMES) - 1] == folder / NAMES[-1]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_file_list_row_after_the_last_raises(count: int) -> None:
    files = FileList(Path("train"))
    for name in NAMES[:count]:
        files.append(Path("train", name))
    with pytest.raises(IndexError):
        files[count]


# Prints the KiB of pages that a forked child gets for itself by reading all paths.
READ_IN_A_FORK = """
    import gc, os, re, sys
    from pathlib import Path
    from train.data.sources.image_file import FileList

    def private_kib():
        text = Path("/proc/self/smaps_rollup").read_text()
        return sum(int(value) for value in re.findall(r"^Private_Dirty: +([0-9]+)", text, re.MULTILINE))

    folder = Path("/data/train")
    chosen = FileList(folder) if sys.argv[1] == "buffers" else []
    for index in range(100_000):
        chosen.append(folder / f"class{index % 10}" / f"image{index:06}.jpg")
    gc.freeze()
    if os.fork() == 0:
        gc.disable()
        before = private_kib()
        for row in range(len(chosen)):
            chosen[row]
        print(private_kib() - before, flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.parametrize(("kind", "least", "most"), [("buffers", 0, 2048), ("objects", 4096, 1 << 20)])
def test_forked_worker_that_reads_all_paths_copies_no_pages(kind: str, least: int, most: int) -> None:
    command = [PYTHON, "-c", textwrap.dedent(READ_IN_A_FORK), kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LAUNCH_LIMIT_S, check=True)
    assert least <= int(done.stdout) <= most
