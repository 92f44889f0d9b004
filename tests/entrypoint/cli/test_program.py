"""What `entrypoint run` accepts as a program, and what it advises instead."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from entrypoint.cli.program import find_program
from tests.conftest import refusal

LAUNCHERS = {
    "torchrun": "torchrun … -m entrypoint run",
    "accelerate": "accelerate launch … -m entrypoint run",
    "mpirun": "mpirun … entrypoint run",
    "mpiexec": "mpiexec … entrypoint run",
    "srun": "srun … entrypoint run",
    "deepspeed": "deepspeed … --module entrypoint run",
}


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("folder", ["", "/usr/bin/"])
@pytest.mark.parametrize("name", LAUNCHERS)
def test_launcher_is_told_how_to_start_the_entrypoint(name: str, folder: str) -> None:
    message = refusal(find_program, [f"{folder}{name}", "-n", "2", "python", "x.py"])
    assert message.startswith(f"run {name}: the entrypoint starts the ranks itself. Use `entrypoint run ")
    assert message.endswith(f", or `{LAUNCHERS[name]} x.py …`.")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["horovodrun", "x.py"],
            "run horovodrun: the entrypoint starts the ranks itself. Use `entrypoint run x.py …`.",
        ),
        ([sys.executable, "x.py"], f"run {sys.executable}: it starts Python itself. Use `entrypoint run x.py …`."),
        (["/usr/bin/python3.99", "x.py"], "run /usr/bin/python3.99: it starts Python itself."),
        (["/usr/bin/env", "x.py"], "/usr/bin/env: a program, no Python script. Use `entrypoint run SCRIPT …`."),
        (["--lr=0.1", "x.py"], "run --lr=0.1: no such flag before the script."),
        (["/dev/null"], "/dev/null: a pipe or device, which can be read only once. Save the script as a file."),
    ],
)
def test_other_words_are_one_line_with_advice(words: list[str], said: str) -> None:
    assert refusal(find_program, words).startswith(said)


@pytest.mark.parametrize("name", ["fifo", "fifo.py", "fifo.ipynb"])
def test_pipe_is_refused_unread(name: str) -> None:
    os.mkfifo(name)  # reading it would block for ever
    refusal(find_program, [name], match=f"^{name}: a pipe or device")


@pytest.mark.parametrize("suffix", ["", ".py", ".ipynb", ".sh", "/x.py"])
@pytest.mark.parametrize("name", ["x" * 300, "loop", "loop.py"])
def test_name_that_no_file_has_is_no_script(name: str, suffix: str) -> None:
    for link in ("loop", "loop.py"):
        Path(link).symlink_to(link)
    refusal(find_program, [name + suffix], match=r": no such script in /.*\. Check the path\.$")


@pytest.mark.usefixtures("removed_folder")
def test_script_in_a_removed_folder_is_not_there() -> None:
    refusal(find_program, ["x.py"], match="no such script in the working folder, which was removed")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tool.bin", b"\x7fELF", "tool.bin: a program, no Python script."),
        ("x.sh", b"", "x.sh: not a Python script. .* start it by itself: ./x.sh"),
        ("sub/x", b"#!/bin/sh", "sub/x: not a Python script. .* start it by itself: sub/x"),
    ],
)
def test_file_that_is_no_python_is_refused(name: str, content: bytes, said: str) -> None:
    Path("sub").mkdir()
    Path(name).write_bytes(content)
    refusal(find_program, [name], match=f"^{said}")


def test_folder_may_have_the_name_of_a_launcher() -> None:
    Path("deepspeed").mkdir()
    Path("deepspeed/__main__.py").write_text("")
    assert find_program(["deepspeed"]).argv == (sys.executable, "deepspeed")
