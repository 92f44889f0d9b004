"""What ranks print: whole lines, in order, nothing lost, in files where asked; and how a failed job ends."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path

import pytest

from entrypoint.launch.rank_output import MAX_LINE_BYTES, Stream
from entrypoint.supervise.store_door import NEVER_MET
from tests.conftest import PYTHON, Entrypoint, clean_environment, needs_two_cores, script
from tests.terminals import terminal

TWO = {"LAUNCH_QUIET": "1", "LAUNCH_NPROC_PER_NODE": "2"}
AGAIN = TWO | {"LAUNCH_MAX_RESTARTS": "1"}


@pytest.mark.parametrize(
    ("chunks", "shown", "rest"),
    [
        ([b"one\ntwo"], [b"one\n"], b"two"),
        ([b"one", b"\n"], [b"", b"one\n"], b""),
        ([b"one\r\ntw", b"o\n"], [b"one\r\n", b"two\n"], b""),
        ([b"one\r", b"\ntwo\n"], [b"", b"one\r\ntwo\n"], b""),
        ([b"\r 10%", b"\r 20%"], [b"\r", b" 10%\r"], b" 20%"),
        ([b""], [b""], b""),
        ([b"x" * MAX_LINE_BYTES, b"y"], [b"", b"x" * MAX_LINE_BYTES + b"y"], b""),
    ],
)
def test_only_whole_lines_are_shown(chunks: list[bytes], shown: list[bytes], rest: bytes) -> None:
    stream = Stream(0, -1, -1, None)
    assert [stream.take(chunk) for chunk in chunks] == shown
    assert stream.pending == rest


def write_many(entrypoint: Entrypoint) -> None:
    script(
        entrypoint.folder,
        "x.py",
        """
        import os, sys

        rank = os.environ["RANK"]
        for number in range(2000):
            print("rank", rank, "line", number, "of 2000", file=sys.stdout if number % 10 else sys.stderr)
        """,
    )


@pytest.mark.launch
@needs_two_cores
def test_lines_of_two_ranks_are_never_mixed(entrypoint: Entrypoint) -> None:
    """Unbuffered, print() writes each word alone, which mixed half of the lines before."""
    write_many(entrypoint)
    out = entrypoint.folder / "out"
    with out.open("w") as file:
        subprocess.run(
            (PYTHON, "-m", "entrypoint", "run", "x.py"),
            cwd=entrypoint.folder,
            env={**clean_environment(), "HOME": str(entrypoint.home), "PYTHONUNBUFFERED": "1", **TWO},
            stdout=file,
            stderr=subprocess.STDOUT,
            check=True,
            timeout=100,
        )
    lines = out.read_text().splitlines()
    for rank in ("0", "1"):  # in order, standard error among the rest
        own = [line for line in lines if line.startswith(f"rank {rank} ")]
        assert own == [f"rank {rank} line {number} of 2000" for number in range(2000)]
    assert lines[4000:] == [f"entrypoint: {NEVER_MET}"]


@pytest.mark.launch
@needs_two_cores
def test_log_dir_has_a_file_of_each_rank_and_restart(entrypoint: Entrypoint) -> None:
    script(
        entrypoint.folder,
        "x.py",
        """
        import os, sys, time

        rank, start = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
        print("out", rank, start)
        print("err", rank, start, file=sys.stderr)
        sys.stdout.flush()
        time.sleep(1 if rank == "0" else 0.2)
        if rank == "1" and start == "0":
            os._exit(7)
        """,
    )
    shown = {"LAUNCH_LOG_DIR": "logs", "LAUNCH_LOG_RANKS": "1", "LAUNCH_LOG_PREFIX": "1"}
    result = entrypoint.succeed("run", "x.py", env=AGAIN | shown)
    for start in range(2):
        for rank in range(2):
            for name in ("out", "err"):
                file = entrypoint.folder / f"logs/attempt_{start}/{rank}/std{name}.log"
                assert file.read_text() == f"{name} {rank} {start}\n"
    assert result.out.splitlines() == [f"[rank 1] out 1 {start}" for start in range(2)]
    assert "[rank 1] err 1 0" in result.err
    assert "err 0" not in result.err


@pytest.mark.launch
def test_single_rank_has_a_log_file_too_and_appends_to_it(entrypoint: Entrypoint) -> None:
    env = {"LAUNCH_QUIET": "1", "LAUNCH_NPROC_PER_NODE": "1", "LAUNCH_LOG_DIR": "logs"}
    for _ in range(2):
        result = entrypoint.run_script("print('here'); raise SystemExit(3)", env=env)
        assert (result.code, result.out) == (3, "here\n")
    assert (entrypoint.folder / "logs/attempt_0/0/stdout.log").read_text() == "here\nhere\n"


@pytest.mark.launch
@needs_two_cores
def test_last_lines_of_failed_rank_are_shown_last(entrypoint: Entrypoint) -> None:
    result = entrypoint.run_script(
        """
        import os, signal, time

        def stop(*_):
            for number in range(50):
                print("rank 0 says", number, flush=True)
            os._exit(0)

        signal.signal(signal.SIGTERM, stop)
        if os.environ["RANK"] == "0":
            open("ready", "w")
        while not os.path.exists("ready"):
            time.sleep(0.01)
        if os.environ["RANK"] == "1":
            for number in range(30):
                print("clue", number)
            raise RuntimeError("the cause")
        time.sleep(60)
        """,
        env=TWO,
    )
    lines = result.err.splitlines()
    start = next(n for n, line in enumerate(lines) if re.match("entrypoint: the last 20 lines of rank 1:", line))
    assert "  RuntimeError: the cause" in lines[start:]
    assert any(line.startswith("  clue 29") for line in lines[start:])
    assert "rank 1 of this job" in lines[-1]
    assert "failed first" in lines[-1]


@pytest.mark.launch
@needs_two_cores
def test_file_of_failed_rank_is_named(entrypoint: Entrypoint) -> None:
    result = entrypoint.run_script(
        "import os, time; time.sleep(9) if os.environ['RANK'] == '0' else os._exit(4)",
        env=TWO | {"LAUNCH_LOG_DIR": "logs"},
    )
    assert result.code == 4
    assert "failed first, with exit code 4" in result.err.splitlines()[-1]
    result = entrypoint.run_script(
        "import os; print('clue', flush=True); os._exit(4)",
        env=TWO | {"LAUNCH_LOG_DIR": "logs", "LAUNCH_LOG_RANKS": "0"},
    )
    assert re.search(r"rank [01](, whole in| is in) logs/attempt_0/[01]", " ".join(result.err.split()))


ENDINGS = {
    "is killed": "os.kill(os.getpid(), 9)",
    "leaves at once": "os._exit(1)",
    "closes its output": "os.close(1); os.close(2); time.sleep(0.3)",
    "leaves a child behind": "subprocess.Popen(['sleep', '60']); sys.exit(0)",
}


@pytest.mark.launch
@needs_two_cores
@pytest.mark.parametrize("how", ENDINGS)
def test_nothing_that_a_rank_printed_is_lost(entrypoint: Entrypoint, how: str) -> None:
    script(
        entrypoint.folder,
        "x.py",
        f"""
        import os, subprocess, sys, time

        os.write(1, b"x" * 20000 + b"\\nthe last words" + os.environ["RANK"].encode())
        {ENDINGS[how]}
        """,
    )
    began = time.monotonic()
    result = entrypoint("run", "x.py", env=TWO)
    assert {"the last words0", "the last words1"} & set(result.out.splitlines())
    if how in ("closes its output", "leaves a child behind"):
        assert result.code == 0
        assert result.out.count("the last words") == 2
    assert time.monotonic() - began < 30
    subprocess.run(("pkill", "-f", "^sleep 60$"), check=False)


@pytest.mark.launch
@needs_two_cores
def test_reader_that_leaves_ends_the_ranks(entrypoint: Entrypoint) -> None:
    script(entrypoint.folder, "x.py", "while True: print('line')")
    command = f"{PYTHON} -m entrypoint run x.py | head -n 3"
    env = {**clean_environment(), "HOME": str(entrypoint.home), **TWO}
    done = subprocess.run(
        ("bash", "-c", command), cwd=entrypoint.folder, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "line\n" * 3
    assert "BrokenPipeError" in done.stderr


@pytest.mark.launch
@needs_two_cores
def test_first_rank_keeps_the_terminal(entrypoint: Entrypoint) -> None:
    script(
        entrypoint.folder,
        "x.py",
        """
        import os, sys, time

        if os.environ["RANK"] == "0":
            for part in range(3):
                sys.stdout.write(f"\\rbar {part}")
                sys.stdout.flush()
                time.sleep(0.1)
            print()
        else:
            time.sleep(1)
        print(f"rank {os.environ['RANK']}:", sys.stdout.isatty(), sys.stderr.isatty())
        """,
    )
    env = {"HOME": str(entrypoint.home), **TWO}
    with terminal(entrypoint.folder, (PYTHON, "-m", "entrypoint", "run", "x.py"), env) as shown:
        assert shown.ended() == 0
        text = shown.said.decode()
    assert "\rbar 0\rbar 1\rbar 2" in text
    assert "rank 0: True True\r\n" in text
    assert "rank 1: False False\r\n" in text


@pytest.mark.launch
@needs_two_cores
def test_full_disk_of_log_files_does_not_end_a_job(entrypoint: Entrypoint) -> None:
    folder = entrypoint.folder / "logs/attempt_0/0"
    folder.mkdir(parents=True)
    (folder / "stdout.log").symlink_to("/dev/full")
    result = entrypoint.run_script("print('here')", env=TWO | {"LAUNCH_LOG_DIR": "logs"})
    assert (result.code, result.out) == (0, "here\nhere\n")
    full = "entrypoint: LAUNCH_LOG_DIR=logs: cannot be written (No space left on device); rank 0 goes on\n"
    assert result.err.startswith(full)


@pytest.mark.launch
@pytest.mark.parametrize("command", ["plan", "run"])
@pytest.mark.parametrize(
    ("env", "said"),
    [
        (
            {"LAUNCH_LOG_RANKS": "0"},
            "LAUNCH_LOG_RANKS=0: the output of the other ranks would be lost. Set",
        ),
        ({"LAUNCH_LOG_RANKS": "2", "LAUNCH_LOG_DIR": "x"}, "LAUNCH_LOG_RANKS=2: the job has ranks 0 to 1"),
        ({"LAUNCH_LOG_RANKS": "1-0", "LAUNCH_LOG_DIR": "x"}, "LAUNCH_LOG_RANKS=1-0: the job has ranks 0 to 1"),
        ({"LAUNCH_LOG_RANKS": "a", "LAUNCH_LOG_DIR": "x"}, "LAUNCH_LOG_RANKS=a:"),
        ({"LAUNCH_LOG_DIR": "x.py"}, "LAUNCH_LOG_DIR=x.py: cannot be written to (Not a directory)"),
        ({"LAUNCH_LOG_DIR": "x.py/logs"}, "LAUNCH_LOG_DIR=x.py/logs: cannot be written to (Not a directory)"),
    ],
)
def test_log_settings_that_cannot_be_are_refused(
    entrypoint: Entrypoint, command: str, env: dict[str, str], said: str
) -> None:
    script(entrypoint.folder, "x.py", "print('never')")
    words = ("plan", "run") if command == "plan" else ("run",)
    result = entrypoint(*words, "x.py", env=TWO | env | {"LAUNCH_OVERSUBSCRIBE": "1"})
    assert result.code in (2, 3)
    assert result.out == ""
    assert result.err.startswith(f"entrypoint: error: {said}")
    assert len(result.err.splitlines()) == 1


@pytest.mark.launch
@needs_two_cores
def test_log_file_that_would_block_is_refused(entrypoint: Entrypoint) -> None:
    folder = entrypoint.folder / "logs/attempt_0/0"
    folder.mkdir(parents=True)
    os.mkfifo(folder / "stdout.log")
    result = entrypoint.run_script("print('never')", env=TWO | {"LAUNCH_LOG_DIR": "logs"})
    assert result.code == 2
    said = "LAUNCH_LOG_DIR=logs: logs/attempt_0/0/stdout.log cannot be written"
    assert result.err.splitlines()[-1].startswith(f"entrypoint: error: {said} (No such device")


@pytest.mark.launch
@needs_two_cores
def test_torchruns_agent_keeps_files_too(entrypoint: Entrypoint) -> None:
    script(entrypoint.folder, "x.py", "import os; print('here', os.environ['RANK'])")
    env = TWO | {"LAUNCH_LAUNCHER": "torchrun", "LAUNCH_LOG_DIR": "logs", "LAUNCH_LOG_RANKS": "1"}
    result = entrypoint("run", "x.py", env=env)
    assert (result.code, result.out) == (0, "[default1]:here 1\n")
    files = sorted(entrypoint.folder.glob("logs/*/attempt_0/*/stdout.log"))
    assert [file.read_text() for file in files] == ["here 0\n", "here 1\n"]


@pytest.mark.launch
def test_log_settings_under_another_launcher_are_named(entrypoint: Entrypoint, tmp_path: Path) -> None:
    script(entrypoint.folder, "x.py", "")
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "LAUNCH_LOG_DIR": str(tmp_path)}
    warnings = entrypoint.plan("run", "x.py", env=rank)["warnings"]
    assert any(line.startswith(f"LAUNCH_LOG_DIR={tmp_path}: no effect, torchrun relays") for line in warnings)
    assert os.listdir(tmp_path) == [] or "logs" not in os.listdir(tmp_path)
