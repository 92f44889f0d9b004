"""Time slices: when one is asked for, what is refused, and that this machine's own kernel grants it to all threads."""

from __future__ import annotations

import os
import platform
from dataclasses import replace
from pathlib import Path

import pytest

from entrypoint.errors import Exit, Refused
from entrypoint.machine import kernel_version
from entrypoint.plan import Plan
from entrypoint.system_call import NUMBERS
from entrypoint.time_slice import time_slice_in_force
from entrypoint.turns import SINCE
from entrypoint.verify import mismatches
from tests.conftest import PYTHON, Entrypoint, script
from tests.entrypoint.test_planner import machine, plan
from tests.entrypoint.test_verify import AS_PLANNED
from tests.machines import write

ENTRYPOINT = (PYTHON, "-m", "entrypoint")
NEW, OLD = (6, 12), (6, 11)
needs_slices = pytest.mark.skipif(kernel_version(Path("/")) < SINCE, reason="needs Linux 6.12, which has time slices")

TELL = """
import os, threading
from entrypoint.time_slice import time_slice_in_force
def tell():
    print("slice", time_slice_in_force(threading.get_native_id()), os.getpriority(os.PRIO_PROCESS, 0), flush=True)
tell()
thread = threading.Thread(target=tell)
thread.start()
thread.join()
"""
# A filter of the kind that containers have: this one call ends with EPERM, all others are let through (seccomp(2)).
FORBID = """
import ctypes, os, struct, sys
LOAD, EQUAL, RETURN, EPERM, ALLOW = 0x20, 0x15, 0x06, 0x50001, 0x7FFF0000
rules = [(LOAD, 0, 0, 0), (EQUAL, 0, 1, int(sys.argv[1])), (RETURN, 0, 0, EPERM), (RETURN, 0, 0, ALLOW)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
program = ctypes.create_string_buffer(struct.pack("HP", len(rules), ctypes.addressof(code)))
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, program, 0, 0):
    sys.exit(f"no filter: {os.strerror(ctypes.get_errno())}")
os.execv(sys.argv[2], sys.argv[2:])
"""


def planned(kernel: tuple[int, ...], environ: dict[str, str], cores: int = 2) -> Plan:
    return plan(replace(machine(cores), kernel=kernel), environ)


@pytest.mark.parametrize(
    ("kernel", "cores", "environ", "microseconds"),
    [
        (NEW, 2, {}, 300),
        (NEW, 2, {"LAUNCH_NPROC_PER_NODE": "2"}, 0),
        (NEW, 4, {"LAUNCH_NPROC_PER_NODE": "2"}, 300),
        (NEW, 1, {}, 0),
        (NEW, 1, {"LAUNCH_TIME_SLICE_US": "3000"}, 3000),
        (NEW, 2, {"LAUNCH_TIME_SLICE_US": "kernel"}, 0),
        (OLD, 2, {}, 0),
        (OLD, 2, {"LAUNCH_TIME_SLICE_US": "kernel"}, 0),
        ((), 2, {}, 0),
    ],
)
def test_which_time_slice_is_asked_for(
    kernel: tuple[int, ...], cores: int, environ: dict[str, str], microseconds: int
) -> None:
    made = planned(kernel, environ, cores)
    said = [decision for decision in made.decisions if decision.what == "time slice"]
    assert made.time_slice_us == microseconds
    assert len(said) == (1 if microseconds or "LAUNCH_TIME_SLICE_US" in environ else 0)
    assert all(("(yours)" in one.why) == ("LAUNCH_TIME_SLICE_US" in environ) for one in said)


@pytest.mark.parametrize(("kernel", "told"), [(OLD, "6.11"), ((), "unknown")])
def test_a_time_slice_that_the_kernel_does_not_have_is_refused(kernel: tuple[int, ...], told: str) -> None:
    with pytest.raises(
        Refused, match=f"LAUNCH_TIME_SLICE_US=100: needs Linux 6.12, this one is {told}; unset"
    ) as error:
        planned(kernel, {"LAUNCH_TIME_SLICE_US": "100"})
    assert error.value.code == Exit.MACHINE


@pytest.mark.parametrize(
    ("release", "version"), [("6.18.44-cloud", (6, 18)), ("5.14.0-503.el9.x86_64", (5, 14)), ("odd", ()), ("", ())]
)
def test_the_kernels_version_is_read(tmp_path: Path, release: str, version: tuple[int, ...]) -> None:
    write(tmp_path, {"proc/sys/kernel/osrelease": release})
    assert kernel_version(tmp_path) == version


@pytest.mark.parametrize(("seen", "lines"), [(100, 0), (None, 0), (1400, 1)])
def test_another_time_slice_than_planned_is_told(seen: int | None, lines: int) -> None:
    made = replace(plan(machine(4), {"LAUNCH_NPROC_PER_NODE": "2"}), time_slice_us=100)
    told = mismatches(made, replace(AS_PLANNED, time_slice_us=seen))
    assert told == ("rank 1: the time slice is 1400 us, planned was 100",) * lines


@needs_slices
@pytest.mark.parametrize(("asked", "niceness"), [(500, 0), (100, 5)])
def test_every_thread_of_the_program_has_it_and_stays_as_nice_as_it_was(
    entrypoint: Entrypoint, tmp_path: Path, asked: int, niceness: int
) -> None:
    program = script(tmp_path, "tell.py", TELL)
    done = entrypoint(
        "run", program, env={"LAUNCH_TIME_SLICE_US": str(asked)}, command=("nice", f"-n{niceness}", *ENTRYPOINT)
    )
    expected = f"slice {asked} {os.getpriority(os.PRIO_PROCESS, 0) + niceness}"
    assert [line for line in done.out.splitlines() if line.startswith("slice")] == [expected] * 2


@needs_slices
def test_the_kernels_own_is_left(entrypoint: Entrypoint, tmp_path: Path) -> None:
    done = entrypoint("run", script(tmp_path, "tell.py", TELL), env={"LAUNCH_TIME_SLICE_US": "kernel"})
    assert f"slice {time_slice_in_force()} " in done.out


@needs_slices
def test_a_real_time_policy_stays_as_it_is(entrypoint: Entrypoint, tmp_path: Path) -> None:
    program = script(tmp_path, "tell.py", "import os\nprint('policy', os.sched_getscheduler(0) == os.SCHED_FIFO)")
    words = ("chrt", "--fifo", "1")
    done = entrypoint("run", program, env={"LAUNCH_TIME_SLICE_US": "100"}, command=(*words, *ENTRYPOINT))
    if "Operation not permitted" in done.err:
        pytest.skip("needs the right to a real-time policy")
    assert "policy True" in done.out


@needs_slices
@pytest.mark.skipif(platform.machine() not in NUMBERS, reason=f"the call's number on {platform.machine()} is not known")
def test_a_container_that_forbids_the_call_is_told_and_the_program_runs(entrypoint: Entrypoint, tmp_path: Path) -> None:
    number = str(NUMBERS[platform.machine()]["sched_setattr"])
    words = (PYTHON, str(script(tmp_path, "forbid.py", FORBID)), number)
    program = script(tmp_path, "done.py", "print('ran')")
    done = entrypoint("run", program, env={"LAUNCH_TIME_SLICE_US": "100"}, command=(*words, *ENTRYPOINT))
    told = "a time slice of 100 us is refused (Operation not permitted); LAUNCH_TIME_SLICE_US=kernel does not ask"
    assert (done.code, done.out) == (0, "ran\n")
    assert told in done.err
