"""Many runs that start at once into one output folder."""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from entrypoint.core.errors import UserError
from tests.factories import train_settings
from train.lock_file import RunLock
from train.report import run_folder

STARTS = 48


def start_at(moment: float, output: Path, name: str | None) -> str:
    """Open a run's folder at a moment, and hold it for a second; return the folder, or why it is refused."""
    with RunLock() as lock:
        time.sleep(max(0.0, moment - time.time()))
        try:
            folder, _ = run_folder.open_folder(train_settings(output_dir=output, run_name=name), lock)
        except UserError as error:
            return f"error: {error}"
        time.sleep(1)
        return folder.name


@pytest.mark.launch
@pytest.mark.parametrize("name", [None, pytest.param("mine", marks=pytest.mark.slow)])
def test_many_starts_within_a_second_have_a_folder_each(tmp_path: Path, name: str | None) -> None:
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(STARTS, context) as pool:
        list(pool.map(abs, range(STARTS)))
        moment = time.time() + 2
        found = [one.result() for one in [pool.submit(start_at, moment, tmp_path, name) for _ in range(STARTS)]]
    folders = [one for one in found if not one.startswith("error: ")]
    refused = [one for one in found if one.startswith("error: ")]
    if name is None:
        assert len(set(folders)) == STARTS, refused
    else:
        assert folders == [name]
        assert all("is training in this folder" in one or "already holds a run" in one for one in refused)
    assert (tmp_path / "latest").resolve().name in folders
