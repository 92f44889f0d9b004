"""Ranks as children of the entrypoint: what they find, how signals reach them, how all end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from entrypoint.launch.meeting import open_rendezvous
from entrypoint.plan.model import RankPlan
from entrypoint.supervise.store_door import NEVER_MET
from tests.conftest import LAUNCH_LIMIT_S, Entrypoint, clean_environment, needs_two_cores, script
from tests.entrypoint.launch.running_ranks import QUIET, lines, started
from tests.factories import make_machine, make_test_plan
from tests.processes import children, has_ended, wait_until

TWO = make_test_plan(make_machine(2), {"LAUNCH_NPROC_PER_NODE": "2"})
ONE = make_test_plan(make_machine(2), {"LAUNCH_NPROC_PER_NODE": "1"})


@pytest.mark.launch
@needs_two_cores
def test_local_sets_the_variables_of_torchrun(entrypoint: Entrypoint) -> None:
    # PYTHON_EXEC and the like torchrun keeps to itself; what its manual promises scripts is a name of these.
    script(
        entrypoint.folder,
        "x.py",
        """
        import json, os, sys
        words = ("RANK", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "ROLE_")
        found = {name: value for name, value in os.environ.items() if any(word in name for word in words)}
        json.dump(found, open(f"{sys.argv[1]}{os.environ['RANK']}.json", "w"))
        """,
    )
    for launcher in ("local", "torchrun"):
        result = entrypoint("run", "x.py", launcher, env=QUIET | {"LAUNCH_LAUNCHER": launcher})
        assert (result.code, result.err) == (0, f"entrypoint: {NEVER_MET}\n")
    for rank in range(2):
        ours, theirs = (
            json.loads((entrypoint.folder / f"{launcher}{rank}.json").read_text()) for launcher in ("local", "torchrun")
        )
        theirs.pop("TORCHELASTIC_SIGNALS_TO_HANDLE", "")  # what torch 2.9 and later tell their agent
        assert set(ours) == set(theirs)
        # The port of the store and the job's name differ.
        own = {"MASTER_PORT", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}
        own |= {"ROLE_NAME"}
        assert {name: value for name, value in ours.items() if name not in own} == {
            name: value for name, value in theirs.items() if name not in own
        }
        assert (ours["MASTER_ADDR"], ours["TORCHELASTIC_USE_AGENT_STORE"]) == ("127.0.0.1", "True")


@pytest.mark.parametrize("use_libuv", [True, False])
def test_port_of_a_single_rank_is_for_its_own_store_alone(use_libuv: bool) -> None:
    from torch.distributed import TCPStore

    with open_rendezvous(ONE, {}) as meeting:
        where = meeting.variables
        host, port = where["MASTER_ADDR"], int(where["MASTER_PORT"])
        for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
            if family == socket.AF_INET6 and not socket.has_dualstack_ipv6():
                continue
            with socket.socket(family) as other, pytest.raises(OSError, match="Address already in use"):
                other.bind((address, port))
        store = TCPStore(host, port, is_master=True, wait_for_workers=False, use_libuv=use_libuv)
        TCPStore(host, port, is_master=False, wait_for_workers=False, use_libuv=use_libuv).set("key", "value")
        assert store.get("key") == b"value"


@pytest.mark.launch
@needs_two_cores
def test_local_master_port_is_used_or_raises(entrypoint: Entrypoint) -> None:
    script(entrypoint.folder, "x.py", "import os; print(os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'])")
    with socket.create_server(("", 0)) as other:
        port = str(other.getsockname()[1])
        taken = entrypoint("run", "x.py", env=QUIET | {"MASTER_PORT": port})
    said = f"entrypoint: error: MASTER_PORT={port}: cannot listen on this port (Address already in use)"
    assert (taken.code, taken.out, taken.err) == (4, "", f"{said}. Set MASTER_PORT to a free port on all nodes.\n")
    mine = entrypoint("run", "x.py", env=QUIET | {"MASTER_PORT": port, "MASTER_ADDR": "no.such.node"})
    assert (mine.code, mine.out) == (0, f"127.0.0.1 {port}\n" * 2), mine.err
    made = entrypoint.plan(env=QUIET | {"MASTER_ADDR": "no.such.node"})
    reported = [one["reason"] for one in made["decisions"] if one["key"] == "MASTER_ADDR"]
    assert reported == ["all ranks are on this node, not at no.such.node"]
    for value in ("abc", "0", "65536", "-1"):
        wrong = entrypoint("run", "x.py", env=QUIET | {"MASTER_PORT": value})
        assert (wrong.code, wrong.err) == (
            2,
            f"entrypoint: error: MASTER_PORT={value}: not a port; expected a number from 1 to 65535\n",
        )


@pytest.mark.launch
@pytest.mark.versions
def test_script_under_torchruns_agent_says_by_75_that_it_saved(entrypoint: Entrypoint) -> None:
    text = """
        import os, signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(60)
    """
    result = entrypoint.run_script(text, "--launcher=torchrun")
    assert (result.code, result.err.splitlines()[-1]) == (75, "entrypoint: preempted: stopped by SIGTERM")


@pytest.mark.launch
@needs_two_cores
@pytest.mark.parametrize(
    ("ending", "number", "code", "said"),
    [
        ("sys.exit(0)", signal.SIGTERM, 0, ""),
        ("sys.exit(75)", signal.SIGTERM, 75, "entrypoint: preempted: stopped by SIGTERM\n"),
        ("sys.exit(75 if rank == '0' else 143)", signal.SIGTERM, 75, "entrypoint: preempted: stopped by SIGTERM\n"),
        ("sys.exit(75 if rank == '0' else 9)", signal.SIGTERM, 143, "entrypoint: error: stopped by SIGTERM\n"),
        ("sys.exit(9)", signal.SIGTERM, 143, "entrypoint: error: stopped by SIGTERM\n"),
        ("signal.signal(number, signal.SIG_DFL); os.kill(os.getpid(), number)", signal.SIGTERM, 143, "…SIGTERM\n"),
        ("pass", signal.SIGINT, 130, "…SIGINT\n"),
        ("pass", signal.SIGHUP, 129, "…SIGHUP\n"),
        ("pass", signal.SIGQUIT, 131, "…SIGQUIT\n"),
    ],
)
def test_local_signal_reaches_each_rank_once(
    entrypoint: Entrypoint, ending: str, number: signal.Signals, code: int, said: str
) -> None:
    # SIGINT and SIGQUIT end Python's ranks; one that only hears of SIGHUP has its time to save, then is killed.
    with started(entrypoint, ending, LAUNCH_GRACE_PERIOD_S="2" if number == signal.SIGHUP else "60") as process:
        for warning in (signal.SIGUSR1, signal.SIGUSR2):
            process.send_signal(warning)
            assert lines(process, 2) == [f"{rank} {warning.name}" for rank in range(2)]
        process.send_signal(number)
        out, err = process.communicate(timeout=LAUNCH_LIMIT_S)
        heard = [] if number in (signal.SIGINT, signal.SIGQUIT) else [f"{rank} {number.name}" for rank in range(2)]
        assert sorted(out.splitlines()) == heard
        assert process.returncode == code
        assert err.endswith(said.replace("…", "entrypoint: error: stopped by "))


LEAVES = """
import os, subprocess, sys, time
child = subprocess.Popen(["sh", "-c", "test $RANK = 0 || trap '' TERM; exec sleep 60"])
print(child.pid, flush=True)
time.sleep(1 if os.environ["RANK"] == "1" else 60)
sys.exit(4)
"""


@pytest.mark.launch
@needs_two_cores
def test_ranks_that_fail_leave_no_processes_behind(entrypoint: Entrypoint) -> None:
    script(entrypoint.folder, "x.py", LEAVES)
    result = entrypoint("run", "x.py", env={"LAUNCH_NPROC_PER_NODE": "2"})
    assert result.code == 4
    left = [int(line) for line in result.out.splitlines() if line.isdecimal()]
    assert len(left) == 2
    wait_until(lambda: all(map(has_ended, left)))


@pytest.mark.launch
@needs_two_cores
@pytest.mark.parametrize("launcher", ["local", "torchrun"])
def test_local_under_nohup_ignores_sighup(entrypoint: Entrypoint, launcher: str) -> None:
    with started(entrypoint, "sys.exit(0)", "nohup", LAUNCH_LAUNCHER=launcher) as process:
        process.send_signal(signal.SIGHUP)
        time.sleep(0.5)  # what must not happen has its time
        process.send_signal(signal.SIGUSR1)
        assert lines(process, 2) == ["0 SIGUSR1", "1 SIGUSR1"]
        process.terminate()
        assert lines(process, 2) == ["0 SIGTERM", "1 SIGTERM"]
        assert process.wait(LAUNCH_LIMIT_S) == {"local": 0, "torchrun": 143}[launcher]


@pytest.mark.launch
@needs_two_cores
@pytest.mark.parametrize("launcher", ["local", "torchrun"])
def test_rank_killed_after_the_grace_period_is_named(entrypoint: Entrypoint, launcher: str) -> None:
    more = {"LAUNCH_LAUNCHER": launcher, "LAUNCH_GRACE_PERIOD_S": "2"}
    with started(entrypoint, "rank == '0' or sys.exit(75)", **more) as process:
        process.terminate()
        err = process.communicate(timeout=LAUNCH_LIMIT_S)[1]
    process_name = r"rank 0 \(process \d+\)" if launcher == "local" else r"process \d+"
    late = rf"entrypoint: {process_name} did not end within 2 s \(LAUNCH_GRACE_PERIOD_S\) and was killed\."
    assert re.fullmatch(rf"{late} What was not saved is lost\.\nentrypoint: error: stopped by SIGTERM\n", err)
    assert process.returncode == 143


@pytest.mark.launch
@needs_two_cores
def test_local_parent_killed_ends_ranks(entrypoint: Entrypoint) -> None:
    with started(entrypoint, "sys.exit(0)") as process:
        ranks = children(process.pid)
        assert len(ranks) == 2
        process.kill()
        wait_until(lambda: all(has_ended(rank) for rank in ranks))
        assert lines(process, 1) == [""], "nobody is left who could print"


@pytest.mark.launch
@needs_two_cores
def test_local_first_exit_decides_when_others_are_stopped(
    entrypoint: Entrypoint,
) -> None:
    script(
        entrypoint.folder,
        "x.py",
        """
        import os, signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: os._exit(print("asked to end", flush=True) or 0))
        if os.environ["RANK"] == "0":
            while not os.path.exists("ready"):
                time.sleep(0.01)
            sys.exit(int(sys.argv[1]))
        open("ready", "w")
        time.sleep(2)
        print("saved too", flush=True)
        sys.exit(int(sys.argv[1]))
        """,
    )
    for code, printed in ((75, "saved too\n"), (7, "asked to end\n")):
        result = entrypoint("run", "x.py", str(code), env=QUIET)
        assert (result.code, result.out) == (code, printed)
        (entrypoint.folder / "ready").unlink()


def run_plan(folder: Path, ranks: tuple[RankPlan, ...], program: str) -> subprocess.CompletedProcess[str]:
    """Run a plan that is made up, in a process of its own whose parent ignores its children's ends."""
    made = replace(
        TWO,
        ranks=ranks,
        program=replace(TWO.program, argv=(sys.executable, "-c", program)),
        environment=replace(TWO.environment, preload=()),
    )
    main = """if True:
        import os, signal, sys
        from entrypoint.job.detect import Job
        from entrypoint.plan.model import Plan
        from entrypoint.launch.local import run
        sys.exit(run(Plan.from_json(sys.argv[1]), Job(), {"PATH": os.environ["PATH"]}))
    """
    return subprocess.run(
        [sys.executable, "-c", main, made.to_json()],
        cwd=folder,
        env={**clean_environment(), "PYTHONPATH": str(Path(__file__).parents[3])},
        preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN),
        capture_output=True,
        text=True,
        timeout=LAUNCH_LIMIT_S,
        check=False,
    )


@pytest.mark.launch
def test_local_inherited_sigchld_ignore_is_reset(tmp_path: Path) -> None:
    cpu = min(os.sched_getaffinity(0))
    result = run_plan(
        tmp_path, (RankPlan(0, (cpu,), 1), RankPlan(1, (cpu,), 1)), "import os; print(os.environ['RANK'])"
    )
    said = f"entrypoint: {NEVER_MET}\n"
    assert (result.returncode, sorted(result.stdout.split()), result.stderr) == (0, ["0", "1"], said)


@pytest.mark.launch
def test_local_unbindable_rank_reports_one_error(tmp_path: Path) -> None:
    nowhere = RankPlan(0, (4095,), 1)
    began = time.monotonic()
    result = run_plan(tmp_path, (nowhere, replace(nowhere, local_rank=1)), "raise SystemExit('never')")
    assert result.returncode == 3
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert "cannot be pinned to CPUs 4095" in result.stderr
    assert time.monotonic() - began < 20
