"""The hosts that PBS, LSF and Grid Engine give to a batch job."""

from __future__ import annotations

from pathlib import Path

import pytest

from entrypoint.core.errors import ExitCode
from entrypoint.job.allocation import ALLOCATION_VAR, Allocation, read_allocation, with_allocation
from entrypoint.job.detect import Job, detect_job
from entrypoint.launch.remote import find_remote_launcher, forwarded_variables, select_remote_launcher
from entrypoint.plan.inputs import RemoteLauncher
from entrypoint.plan.planner import make_plan
from entrypoint.settings import read_launch_settings
from tests.conftest import refusal, script
from tests.factories import make_machine, make_test_plan, plan_inputs, reason_for

LSF = {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "node1 4 node2 2 "}
FILES = {
    # OpenPBS: a line for each of `mpiprocs`. Torque: a line for each CPU of `ppn`. Grid Engine: sge_pe(5).
    "OpenPBS": ("PBS_NODEFILE", {"PBS_JOBID": "7.pbs"}, "node1\nnode1\nnode2\nnode2\n", (("node1", 0), ("node2", 0))),
    "Torque": (
        "PBS_NODEFILE",
        {"PBS_JOBID": "7", "PBS_NUM_PPN": "2", "PBS_NUM_NODES": "2"},
        "node2\nnode2\nnode1\nnode1\n",
        (("node2", 2), ("node1", 2)),
    ),
    "Grid Engine": (
        "PE_HOSTFILE",
        {"JOB_ID": "7"},
        "node1.site 4 all.q@node1.site <NULL>\nnode2.site 2 all.q@node2.site UNDEFINED\n",
        (("node1.site", 4), ("node2.site", 2)),
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_hosts_come_from_the_schedulers_file(tmp_path: Path, name: str) -> None:
    variable, environ, text, hosts = FILES[name]
    file = script(tmp_path, "hosts", text)
    assert read_allocation(environ | {variable: str(file)}).hosts == hosts


def test_hosts_come_from_lsf_variable() -> None:
    assert read_allocation(LSF) == Allocation("LSF", (("node1", 4), ("node2", 2)))


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"PBS_NODEFILE": "/nowhere"},  # inherited by a shell, outside a job
        {"LSB_MCPU_HOSTS": "node1 4"},
        LSF | {"SLURM_JOB_ID": "1"},  # Slurm's wrappers set them too
        {ALLOCATION_VAR: ""},
        {ALLOCATION_VAR: "LSF="},
    ],
)
def test_process_outside_a_batch_job_has_no_allocation(environ: dict[str, str]) -> None:
    assert read_allocation(environ) == Allocation()


@pytest.mark.parametrize(
    ("variable", "text", "said"),
    [
        ("LSB_MCPU_HOSTS", "node1 x", "LSB_MCPU_HOSTS: node1 x is no host with its slots"),
        ("LSB_MCPU_HOSTS", "node1", r"node1 \? is no host"),
        ("LSB_MCPU_HOSTS", "-oProxyCommand=x 2", "-oProxyCommand=x 2 is no host"),
        ("PE_HOSTFILE", "node1\n", r"PE_HOSTFILE=.*: node1 \? is no host"),
        ("PBS_NODEFILE", "a;b\n", "PBS_NODEFILE=.*: a;b 0 is no host"),
    ],
)
def test_list_of_hosts_that_is_none_is_refused(tmp_path: Path, variable: str, text: str, said: str) -> None:
    value = text if variable.startswith("LSB") else str(script(tmp_path, "hosts", text))
    refusal(read_allocation, {"LSB_JOBID": "1", "PBS_JOBID": "1", variable: value}, match=said)


def job_with(environ: dict[str, str], hostname: str = "node1") -> Job:
    return with_allocation(detect_job(environ), read_allocation(environ), hostname)


def test_batch_script_on_several_hosts_starts_mpirun() -> None:
    job = job_with(LSF)
    assert (job.hostnames, job.master_addr, job.granted_cpus) == (("node1", "node2"), "node1", 4)
    assert select_remote_launcher(read_launch_settings(LSF, {}).values, job, 1) == "mpirun"
    for setting in ({"LAUNCH_LAUNCHER": "direct"}, {"LAUNCH_LAUNCHER": "local"}):
        assert select_remote_launcher(read_launch_settings(LSF | setting, {}).values, job, 1) == ""
    one = {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "node1 4"}
    assert select_remote_launcher(read_launch_settings(one, {}).values, job_with(one), 1) == ""


def test_slots_are_the_cpus_that_a_job_may_use() -> None:
    environ = {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "node1 4"}
    made = make_test_plan(make_machine(16), environ, job_with(environ, "node1.site"))
    assert "LSF grants 4 CPUs" in reason_for(made, "cores")
    assert made.ranks[0].threads == 4


def test_ranks_on_other_hosts_know_their_slots() -> None:
    text = read_allocation(LSF).to_variable()
    assert text == "LSF=node1:4,node2:2"
    assert ALLOCATION_VAR in forwarded_variables({ALLOCATION_VAR: text})
    rank = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    job = job_with(rank | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", ALLOCATION_VAR: text}, "node2")
    assert (job.launcher, job.granted_cpus, job.hostnames, job.scheduler) == ("Open MPI", 2, (), "LSF")


def test_file_of_hosts_that_a_container_hides_is_named() -> None:
    environ = {"PBS_JOBID": "7", "PBS_NODEFILE": "/var/spool/pbs/aux/7"}
    job = job_with(environ)
    assert job.hostnames == ()
    made = make_test_plan(make_machine(4), environ, job)
    assert any(
        line.startswith("PBS_NODEFILE=/var/spool/pbs/aux/7 (No such file or directory): does not tell the hosts here")
        for line in made.warnings
    )
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert not job_with(environ | rank).hidden_hosts


def test_hosts_without_mpirun_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    programs: dict[str, str] = {}  # no files: /tmp may be mounted noexec
    monkeypatch.setattr("shutil.which", programs.get)
    refusal(
        find_remote_launcher,
        read_launch_settings(LSF, {}).values,
        job_with(LSF),
        1,
        LSF,
        match=r"this batch script has 2 nodes \(node1 …\) and no mpirun is here",
        code=ExitCode.MACHINE,
    )
    programs["jsrun"] = "/usr/bin/jsrun"
    refusal(
        find_remote_launcher,
        read_launch_settings(LSF, {}).values,
        job_with(LSF),
        1,
        LSF,
        match=r"this LSF job has 2 nodes, and here jsrun starts ranks on them\. Write: jsrun",
    )


def test_hosts_of_a_user_win_over_the_schedulers() -> None:
    environ = LSF | {"LAUNCH_HOSTS": "node2:1"}
    mpirun = RemoteLauncher("/usr/bin/mpirun", "Open MPI", (("node2", 1),))
    inputs = plan_inputs(make_machine(4), environ, job_with(environ), remote_launcher=mpirun)
    assert make_plan(inputs).nodes.world_size == 1
