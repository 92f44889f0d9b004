"""What starts ranks on several nodes, and what it gets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from entrypoint.core.errors import ExitCode
from entrypoint.core.process import own_command
from entrypoint.job.detect import Job, detect_job
from entrypoint.job.node_group import NodeGroup
from entrypoint.launch.remote import (
    ROOT_CONSENTS,
    detect_mpi,
    find_remote_launcher,
    forwarded_variables,
    read_hosts,
    select_remote_launcher,
    with_remote_command,
    withheld_variables,
)
from entrypoint.plan.inputs import RemoteLauncher
from entrypoint.plan.model import Plan
from entrypoint.plan.planner import make_plan
from entrypoint.settings import read_launch_settings
from tests.conftest import refusal, script
from tests.factories import make_machine, plan_inputs

BATCH = {
    "SLURM_JOB_ID": "42", "SLURM_PROCID": "0", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_CPUS_PER_NODE": "8(x2)",
    "SLURM_TASKS_PER_NODE": "1(x2)",
}  # fmt: skip


def plan(environ: dict[str, str], starter: RemoteLauncher | None, cores: int = 8) -> Plan:
    job = detect_job(environ)
    inputs = plan_inputs(make_machine(cores), environ, job, remote_launcher=starter, run_token="77")
    return with_remote_command(make_plan(inputs), inputs)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", ()),
        ("r1:4,r2:2", (("r1", 4), ("r2", 2))),
        ("r1,r2.site.org", (("r1", 0), ("r2.site.org", 0))),
        ("10.0.0.1:1", (("10.0.0.1", 1),)),
    ],
)
def test_hosts_are_listed_with_the_ranks_on_each(text: str, hosts: tuple[tuple[str, int], ...]) -> None:
    assert read_hosts(text) == hosts


def test_hostfile_accepts_open_mpi_format(tmp_path: Path) -> None:
    file = script(tmp_path, "hosts", "r1 slots=4\n# the small one\nr2:2\n\nr3  # as many as here\n")
    assert read_hosts(str(file)) == (("r1", 4), ("r2", 2), ("r3", 0))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("r1:x", "r1:x is no host; expected a form like r1:4,r2:2"),
        ("r1,,r2", "is no host"),
        ("r1:0", "r1:0 is no host"),
        ("/nowhere/hosts", "cannot be read"),
        ("-oProxyCommand=x", "is no host"),
        ("/dev/zero", r"cannot be read \(Not a regular file\)"),
        ("x" * 300, "is no host"),
        ("x" * 300 + "/hosts", r"cannot be read \(File name too long\)"),
        ("fifo", r"cannot be read \(Not a regular file\)"),
        ("./fifo", r"cannot be read \(Not a regular file\)"),
        ("./folder", r"cannot be read \(Is a directory\)"),
        ("binary", "is no host"),
        ("empty", "names no host"),
    ],
)
def test_ranks_per_host_invalid_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")  # reading it would block
    Path("folder").mkdir()
    Path("binary").write_bytes(bytes(range(256)))
    Path("empty").write_text("")
    refusal(read_hosts, text, match=said)


def test_host_may_have_the_name_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r1").mkdir()
    assert read_hosts("r1") == (("r1", 0),)


@pytest.mark.parametrize(
    ("environ", "nodes", "name"),
    [
        ({}, 1, ""),
        ({"LAUNCH_HOSTS": "r1,r2"}, 1, "mpirun"),
        ({"LAUNCH_LAUNCHER": "mpirun"}, 1, "mpirun"),
        (BATCH, 1, "srun"),
        (BATCH | {"LAUNCH_LAUNCHER": "mpirun"}, 1, "mpirun"),
        (BATCH | {"LAUNCH_LAUNCHER": "direct"}, 1, ""),
        (BATCH | {"LAUNCH_LAUNCHER": "torchrun"}, 1, ""),
        (BATCH | {"SLURM_JOB_NODELIST": "n1"}, 1, ""),
        (BATCH | {"LAUNCH_NNODES": "2"}, 2, ""),
        (BATCH | {"SLURM_STEP_ID": "0", "SLURM_LOCALID": "0"}, 1, ""),
    ],
)
def test_find_remote_launcher_with_hosts_selects_launcher(environ: dict[str, str], nodes: int, name: str) -> None:
    assert select_remote_launcher(read_launch_settings(environ, {}).values, detect_job(environ), nodes) == name


def test_find_remote_launcher_batch_without_srun_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    refusal(
        find_remote_launcher,
        read_launch_settings(BATCH, {}).values,
        detect_job(BATCH),
        1,
        BATCH,
        match=r"2 nodes \(n1 …\) and no srun is here .*; write: srun apptainer exec",
        code=ExitCode.MACHINE,
    )
    refusal(
        find_remote_launcher,
        read_launch_settings({"LAUNCH_LAUNCHER": "mpirun"}, {}).values,
        Job(),
        NodeGroup().nnodes,
        {},
        match="LAUNCH_LAUNCHER=mpirun: no mpirun on PATH here; inside a container start it from",
        code=ExitCode.MACHINE,
    )
    by_hosts = read_launch_settings({"LAUNCH_HOSTS": "a,b"}, {}).values
    said = "LAUNCH_HOSTS=a,b: no mpirun on PATH here"
    refusal(find_remote_launcher, by_hosts, Job(), NodeGroup().nnodes, {}, match=said, code=ExitCode.MACHINE)


@pytest.mark.launch
@pytest.mark.parametrize(
    ("version", "mpi"),
    [
        ("mpirun (Open MPI) 4.1.4", ("Open MPI", 4)),
        ("mpirun (Open MPI) 5.0.11", ("Open MPI", 5)),
        ("mpirun (Open MPI) v10.0.0rc1", ("Open MPI", 10)),
        ("mpiexec (OpenRTE) 2.1.1", ("Open MPI", 2)),
        ("mpirun (Open MPI) main", ("Open MPI", 0)),
        ("HYDRA build details:", ("hydra", 0)),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.13", ("hydra", 0)),
    ],
)
def test_detect_mpi_reads_version_output(tmp_path: Path, version: str, mpi: tuple[str, int]) -> None:
    program = script(tmp_path, "mpirun", f"#!/bin/sh\necho '{version}'\n")
    program.chmod(0o755)
    assert detect_mpi(str(program)) == mpi
    program.write_text("#!/bin/sh\necho someone else\n")
    refusal(detect_mpi, str(program), match="--version says someone else, neither Open MPI nor", code=ExitCode.MACHINE)


@pytest.mark.launch
def test_find_remote_launcher_unreachable_nodes_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path, "mpirun", "#!/bin/sh\necho 'mpirun (Open MPI) 4.1.4'\n").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    environ = {"LAUNCH_HOSTS": "r1:4,r2:2", **dict.fromkeys(ROOT_CONSENTS, "1")}
    values = read_launch_settings(environ, {}).values
    refusal(
        find_remote_launcher,
        values,
        Job(),
        1,
        environ,
        match=r"LAUNCH_HOSTS=r1:4,r2:2: no ssh is here to reach r2 with\. .* apptainer exec",
        code=ExitCode.MACHINE,
    )
    assert find_remote_launcher(values, Job(), 1, environ | {"SLURM_JOB_ID": "7"})
    script(tmp_path, "ssh", "#!/bin/sh\n").chmod(0o755)
    assert find_remote_launcher(values, Job(), 1, environ)


@pytest.mark.launch
def test_open_mpi_as_root_without_consent_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path, "mpirun", "#!/bin/sh\necho 'mpirun (Open MPI) 4.1.4'\n").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    values = read_launch_settings({"LAUNCH_LAUNCHER": "mpirun"}, {}).values
    said = "Open MPI does not start as root. Set OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
    refusal(find_remote_launcher, values, Job(), 1, {ROOT_CONSENTS[0]: "1"}, match=said, code=ExitCode.MACHINE)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert find_remote_launcher(values, Job(), 1, {})


@pytest.mark.parametrize(
    ("more", "tasks", "cpus"),
    [
        ({}, 2, 8),
        ({"SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "2(x2)"}, 4, 4),
        ({"SLURM_NTASKS": "4", "SLURM_CPUS_PER_TASK": "3"}, 4, 3),
        ({"SLURM_NTASKS": "4", "LAUNCH_NPROC_PER_NODE": "4"}, 8, 2),
    ],
)
def test_srun_command_has_tasks_and_cpus_per_task(more: dict[str, str], tasks: int, cpus: int) -> None:
    made = plan(BATCH | more, RemoteLauncher("/usr/bin/srun"))
    assert (made.launcher, made.nodes.world_size) == ("srun", tasks)
    assert made.command == (
        *("/usr/bin/srun", "--nodes=2", f"--ntasks={tasks}", f"--cpus-per-task={cpus}", "--cpu-bind=none"),
        *("--kill-on-bad-exit=1", *own_command("run", "x.py", python="python")),
    )


def test_mpirun_command_has_hosts_and_variables_no_binding() -> None:
    environ = {"LAUNCH_HOSTS": "r1:4,r2:2", "TRAIN_EPOCHS": "3", "AWS_SECRET_ACCESS_KEY": "x", "HOME": "/root"}
    hosts = read_hosts(environ["LAUNCH_HOSTS"])
    made = plan(environ, RemoteLauncher("/usr/bin/mpirun", "Open MPI", hosts))
    words = " ".join(made.command)
    assert words.startswith("/usr/bin/mpirun --bind-to none -np 6 --host r1:4,r2:2 ")
    assert words.endswith(f" {' '.join(own_command('run', 'x.py', python='python'))}")
    named = [name for flag, name in zip(made.command, made.command[1:], strict=False) if flag == "-x"]
    ours = ["ENTRYPOINT_JOB", "ENTRYPOINT_JOB_KEY", "ENTRYPOINT_STARTED", "ENTRYPOINT_STATUS_RECORDS"]
    assert named == [*ours, "LAUNCH_HOSTS", "MASTER_ADDR", "TRAIN_EPOCHS"]
    assert (made.nodes.world_size, made.environment.variables["MASTER_ADDR"]) == (6, "r1")
    assert "OMP_NUM_THREADS" not in made.environment.variables, "each node's own, not this one's"

    hydra = plan(environ, RemoteLauncher("/opt/mpirun", "hydra", hosts)).command
    assert hydra[:5] == ("/opt/mpirun", "-n", "6", "-hosts", "r1:4,r2:2")
    assert hydra[5:7] == ("-genvlist", ",".join(named))


@pytest.mark.parametrize(
    ("major", "option", "name", "daemon", "variable"),
    [
        (4, "--mca", "orte_launch_agent", "orted", "OMPI_MCA_orte_launch_agent"),
        (5, "--prtemca", "prte_launch_agent", "prted", "PRTE_MCA_prte_launch_agent"),
    ],
)
def test_mpirun_in_apptainer_starts_daemons_in_same_image(
    major: int, option: str, name: str, daemon: str, variable: str
) -> None:
    environ = {"LAUNCH_HOSTS": "r1:1,r2:1", "APPTAINER_CONTAINER": "/images/cuda.sif"}
    starter = RemoteLauncher("/usr/bin/mpirun", "Open MPI", read_hosts(environ["LAUNCH_HOSTS"]), major)
    for more, words in (({}, "apptainer exec"), ({"APPTAINER_NV": "1"}, "apptainer exec --nv")):
        command = plan(environ | more, starter).command
        place = command.index(name)
        assert command[place - 1 : place + 2] == (option, name, f"{words} /images/cuda.sif {daemon}")
    own = plan(environ | {variable: daemon}, starter).command
    assert name not in own, "a user's own stands"
    assert name not in plan({"LAUNCH_HOSTS": "r1:1,r2:1"}, starter).command


def test_mpirun_in_batch_job_uses_its_nodes_and_tasks() -> None:
    environ = BATCH | {"LAUNCH_LAUNCHER": "mpirun", "SLURM_NTASKS": "3", "SLURM_TASKS_PER_NODE": "2,1"}
    words = " ".join(plan(environ, RemoteLauncher("/usr/bin/mpirun", "Open MPI")).command)
    assert "-np 3 --host n1:2,n2:1" in words


def test_find_remote_launcher_heterogeneous_job_raises() -> None:
    environ = BATCH | {"SLURM_HET_SIZE": "3"}
    chosen = read_launch_settings(environ, {})
    refusal(
        find_remote_launcher,
        chosen.values,
        detect_job(environ),
        1,
        environ,
        match=r"has 3 parts.* write: srun --het-group=0-2 entrypoint",
    )
    chosen = read_launch_settings({"LAUNCH_LAUNCHER": "direct"}, {})
    assert find_remote_launcher(chosen.values, detect_job(environ), 1, environ) is None


def test_forwarded_variables_contain_no_secret() -> None:
    secrets = {"GITHUB_TOKEN": "x", "AWS_SECRET_ACCESS_KEY": "x", "WANDB_API_KEY": "x", "SSH_AUTH_SOCK": "x"}
    withheld = {"TORCH_HUB_TOKEN": "x", "NCCL_SECRET": "x", "UCX_password": "x", "FI_PASSWD": "x", "CCL_KEY": "x"}
    needed = {"UCX_IB_PKEY": "x", "NCCL_IB_PKEY": "x", "TORCH_TOKENS": "x"}
    environ = secrets | withheld | needed
    assert set(forwarded_variables(environ)) & set(environ) == set(needed)
    assert withheld_variables(environ) == sorted(withheld)


@pytest.mark.parametrize("mpi", ["Open MPI", "hydra"])
def test_plan_names_withheld_secrets_and_shows_no_value(mpi: str) -> None:
    environ = {"LAUNCH_HOSTS": "a:8,b:8", "TORCH_HUB_TOKEN": "hidden-value", "NCCL_DEBUG": "shown-value"}
    made = plan(environ, RemoteLauncher("mpirun", mpi, (("a", 8), ("b", 8))), cores=2)
    assert "TORCH_HUB_TOKEN: not passed to other nodes, because the name is that of a secret" in made.warnings
    command = " ".join(made.command)
    assert "NCCL_DEBUG" in command
    assert not any(word in command for word in ("TORCH_HUB_TOKEN", "hidden-value", "shown-value"))


def test_plan_for_hosts_counts_all_their_ranks() -> None:
    made = plan({"LAUNCH_HOSTS": "a:8,b:8"}, RemoteLauncher("mpirun", "Open MPI", (("a", 8), ("b", 8))), cores=2)
    assert (made.nodes.nnodes, made.nodes.nproc_per_node, made.nodes.world_size) == (2, 8, 16)
    decisions = {one.key: one for one in made.decisions}
    assert (decisions["ranks"].value, decisions["ranks"].setting) == ("16", "LAUNCH_HOSTS=a:8,b:8")
    assert "unused" not in decisions["backend"].text
    assert made.ranks == ()
    assert not {"cores", "threads", "openmp", "allocator"} & set(decisions), "those of this node, which has no rank"
    assert any("the ranks are on other nodes" in line for line in made.warnings)


def test_plan_for_this_host_is_limited_by_its_cores() -> None:
    here = RemoteLauncher("mpirun", "Open MPI", (("node1", 2), ("b", 2)))
    made = plan({"LAUNCH_HOSTS": "node1:2,b:2"}, here, cores=2)
    assert (made.nodes.world_size, len(made.ranks)) == (4, 2)
    many = RemoteLauncher("mpirun", "Open MPI", (("node1", 8),))
    refusal(
        plan, {"LAUNCH_HOSTS": "node1:8"}, many, cores=2, match="8 ranks: more ranks than cores", code=ExitCode.MACHINE
    )


@pytest.mark.parametrize(
    ("environ", "starter", "other"),
    [
        ({"LAUNCH_LAUNCHER": "direct"}, None, "LAUNCH_LAUNCHER=direct"),
        ({"LAUNCH_LAUNCHER": "local"}, None, "LAUNCH_LAUNCHER=local"),
        ({"LAUNCH_LAUNCHER": "srun"}, RemoteLauncher("srun", "", (("a", 1),)), "LAUNCH_LAUNCHER=srun"),
    ],
)
def test_hosts_without_mpirun_are_refused(environ: dict[str, str], starter: RemoteLauncher | None, other: str) -> None:
    refusal(
        plan,
        {"LAUNCH_HOSTS": "a:1"} | environ,
        starter,
        match=f"LAUNCH_HOSTS=a:1: only mpirun uses it, and {other} starts no mpirun",
    )


def test_srun_inside_srun_pty_shares_the_cpus_of_its_step() -> None:
    made = plan(BATCH | {"SLURM_PTY_PORT": "4123"}, RemoteLauncher("srun"))
    assert "--overlap" in made.command
    assert "--overlap" not in plan(BATCH, RemoteLauncher("srun")).command
