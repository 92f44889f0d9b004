"""What a record says of its conditions: the commit, the machine, and the use of built /proc trees."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from benchmarks.conditions import MachineFacts, Others, is_busy, read_machine, read_source, read_versions
from tests.conftest import PYTHON

CPUS = sorted(os.sched_getaffinity(0))


def build_proc(proc: Path, used: int, idle: int, stolen: int = 0) -> None:
    """Write a /proc in which each CPU of this process has so many ticks used, idle and stolen."""
    row = f"{used} 0 0 {idle} 0 0 0 {stolen} 0 0"
    lines = [f"cpu  {used} 0 0 {idle} 0 0 0 {stolen} 0 0", *(f"cpu{cpu} {row}" for cpu in CPUS)]
    (proc / "stat").write_text("\n".join(lines) + "\nctxt 1\n")


@pytest.mark.launch
@pytest.mark.parametrize(
    ("used", "stolen", "share", "busy"), [(100, 0, 1.0, True), (3, 0, 0.03, False), (0, 50, 0.5, True)]
)
def test_load_of_others_makes_a_machine_busy(tmp_path: Path, used: int, stolen: int, share: float, busy: bool) -> None:
    build_proc(tmp_path, 1000, 5000, 100)
    others = Others(tmp_path)
    time.sleep(0.5)
    build_proc(tmp_path, 1000 + used, 5100 - used - stolen, 100 + stolen)
    found = others.busy_cpus()
    assert found == pytest.approx(share * len(CPUS), abs=0.06)
    assert is_busy(found, len(CPUS)) is busy


def test_use_is_unknown_where_the_kernel_counts_nothing(tmp_path: Path) -> None:
    assert Others(tmp_path).busy_cpus() is None
    build_proc(tmp_path, 0, 0)
    assert Others(tmp_path).busy_cpus() is None
    assert not is_busy(None, 1)


@pytest.mark.launch
def test_children_that_ended_are_no_others() -> None:
    others, started = Others(), time.monotonic()
    code = "import time\nuntil = time.process_time() + 1\nwhile time.process_time() < until: pass"
    subprocess.run([PYTHON, "-c", code], check=True)
    found, span = others.busy_cpus(), time.monotonic() - started
    assert found is not None
    assert found <= len(CPUS) - 1 / span + 0.1


@pytest.mark.parametrize(
    ("cpu", "slug"),
    [
        ("AMD EPYC 9B14 96-Core Processor", "amd-epyc-9b14-2cpus"),
        ("Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", "intel-xeon-platinum-8481c-2cpus"),
        ("aarch64", "aarch64-2cpus"),
    ],
)
def test_slug_names_model_and_number_of_cpus(cpu: str, slug: str) -> None:
    assert MachineFacts(cpu, 2, 1, None, [], 16.0, [], "").slug == slug


def test_machine_and_versions_are_those_of_this_process() -> None:
    machine = read_machine()
    assert machine.cpus == len(CPUS)
    assert machine.memory_gib > 0
    assert {"python", "torch", "kernel"} <= set(read_versions())


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_changed_files_are_named_except_documents(tmp_path: Path) -> None:
    assert read_source(tmp_path / "missing").commit == ""
    for words in (["init", "-q"], ["config", "user.email", "a@b"], ["config", "user.name", "a"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    (tmp_path / "train.py").write_text("1\n")
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    subprocess.run(["git", "commit", "-q", "-m", "One"], cwd=tmp_path, check=True)
    (tmp_path / "README.md").write_text("figures\n")
    (tmp_path / "benchmarks/results").mkdir(parents=True)
    (tmp_path / "benchmarks/results/one.json").write_text("{}\n")
    clean = read_source(tmp_path)
    assert (len(clean.commit), clean.changed) == (40, [])
    (tmp_path / "train.py").write_text("2\n")
    (tmp_path / "new file.py").write_text("3\n")
    assert read_source(tmp_path).changed == ["new file.py", "train.py"]
