"""The plan: each decision, its reason, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st
from msgspec.structs import replace

from entrypoint.core.errors import ExitCode, UserError
from entrypoint.core.settings_base import groups_of
from entrypoint.job.detect import Job, LauncherBinding
from entrypoint.job.node_group import port_from_job_id
from entrypoint.machine.detect import Machine
from entrypoint.machine.gpus import Gpu
from entrypoint.machine.interpreter import Interpreter, Packages
from entrypoint.plan.inputs import RemoteLauncher
from entrypoint.plan.model import Plan, Program
from entrypoint.plan.planner import make_plan
from entrypoint.settings import LaunchSettings
from tests.conftest import FUZZ_EXAMPLES, refusal
from tests.factories import SCRIPT, make_machine, make_test_plan, plan_inputs, reason_for
from tests.strategies import machines


def test_single_rank_uses_all_cores_without_launcher() -> None:
    made = make_test_plan(make_machine(4))
    assert (made.launcher, made.nodes.nproc_per_node, made.device, made.backend) == ("direct", 1, "cpu", "gloo")
    assert made.ranks[0].cpus == (0, 1, 2, 3)
    assert made.ranks[0].threads == 4
    assert made.command == SCRIPT.argv


def test_two_ranks_share_cores_without_torchrun() -> None:
    made = make_test_plan(make_machine(5), {"LAUNCH_NPROC_PER_NODE": "2"})
    assert made.launcher == "local"
    assert made.command == SCRIPT.argv
    assert [rank.cpus for rank in made.ranks] == [(0, 1, 2), (3, 4)]
    assert [rank.threads for rank in made.ranks] == [3, 2]
    assert made.environment.variables["GLOO_SOCKET_IFNAME"] == "lo"


ON_TWO_NODES = {"LAUNCH_NNODES": "2", "LAUNCH_NODE_RANK": "1", "MASTER_ADDR": "r1", "LAUNCH_MAX_RESTARTS": "1"}


@pytest.mark.parametrize("environ", [{"LAUNCH_LAUNCHER": "torchrun"}, ON_TWO_NODES])
def test_torchrun_starts_ranks_if_requested_or_for_restarts(environ: dict[str, str]) -> None:
    made = make_test_plan(make_machine(5), {"LAUNCH_NPROC_PER_NODE": "2", **environ})
    assert made.launcher == "torchrun"
    assert [rank.cpus for rank in made.ranks] == [(0, 1, 2), (3, 4)]
    assert "--nproc-per-node=2" in made.command
    assert "x.py" not in made.command, "torchrun's parser must never see the program's own arguments"


def test_more_ranks_than_cores_raises_with_limit() -> None:
    for machine, name, number, limit in (
        (make_machine(2), "LAUNCH_NPROC_PER_NODE", 3, "2 physical cores"),
        (make_machine(2), "PET_NPROC_PER_NODE", 3, "2 physical cores"),
        (make_machine(8, quota=1.5), "LAUNCH_NPROC_PER_NODE", 2, r".*cgroup limit 1\.5 CPUs"),
    ):
        said = f"{name}={number}: more ranks than cores: {limit}"
        refusal(make_test_plan, machine, {name: str(number)}, match=said, code=ExitCode.MACHINE)


def test_oversubscribed_ranks_share_and_wait_passively() -> None:
    made = make_test_plan(make_machine(2), {"LAUNCH_NPROC_PER_NODE": "3", "LAUNCH_OVERSUBSCRIBE": "1"})
    assert [rank.cpus for rank in made.ranks] == [(0, 1)] * 3
    assert [rank.threads for rank in made.ranks] == [1, 1, 1]
    assert made.environment.variables["OMP_WAIT_POLICY"] == "passive"


def test_gpus_give_one_rank_each_and_nccl() -> None:
    made = make_test_plan(make_machine(8, gpus=2))
    assert (made.device, made.backend, made.nodes.nproc_per_node) == ("cuda", "nccl", 2)
    assert [rank.gpu for rank in made.ranks] == [0, 1]


@pytest.mark.parametrize(("backend", "endless"), [("ccl", True), ("mpi", True), ("gloo", False)])
def test_backend_without_a_time_limit_is_named_for_scripts(backend: str, endless: bool) -> None:
    environ = {"LAUNCH_BACKEND": backend, "LAUNCH_NPROC_PER_NODE": "2"}
    for kind in ("script", "train"):
        reason = reason_for(make_test_plan(make_machine(4), environ, program=replace(SCRIPT, kind=kind)), "backend")
        assert ("has no time limit" in reason) == (endless and kind == "script")


def test_cpu_device_on_gpu_node_is_used() -> None:
    made = make_test_plan(make_machine(4, gpus=2), {"LAUNCH_DEVICE": "cpu"})
    assert (made.device, made.backend, made.nodes.nproc_per_node) == ("cpu", "gloo", 1)


@pytest.mark.parametrize(
    ("environ", "gpus", "said", "code"),
    [
        ({"LAUNCH_DEVICE": "cuda"}, 0, "LAUNCH_DEVICE=cuda: no GPU is visible", ExitCode.MACHINE),
        (
            {"LAUNCH_DEVICE": "cuda", "CUDA_VISIBLE_DEVICES": "7"},
            0,
            "CUDA_VISIBLE_DEVICES=7 names none",
            ExitCode.MACHINE,
        ),
        ({"LAUNCH_BACKEND": "nccl"}, 0, "LAUNCH_BACKEND=nccl: nccl needs a GPU", ExitCode.MACHINE),
        ({"LAUNCH_NPROC_PER_NODE": "3"}, 2, "more ranks than the 2 visible GPUs", ExitCode.MACHINE),
        ({"LAUNCH_THREADS": "2", "OMP_NUM_THREADS": "4"}, 0, "LAUNCH_THREADS=2 and OMP_NUM_THREADS=4", ExitCode.USAGE),
        ({"LAUNCH_THREADS": "2", "MKL_NUM_THREADS": "3"}, 0, "LAUNCH_THREADS=2 and MKL_NUM_THREADS=3", ExitCode.USAGE),
        (
            {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "3"},
            0,
            "OMP_NUM_THREADS=2 and MKL_NUM_THREADS=3",
            ExitCode.USAGE,
        ),
        ({"OMP_NUM_THREADS": "lots"}, 0, "OMP_NUM_THREADS=lots: not a whole number", ExitCode.USAGE),
        ({"MKL_NUM_THREADS": "some"}, 0, "MKL_NUM_THREADS=some: not a whole number", ExitCode.USAGE),
    ],
)
def test_impossible_settings_raise(environ: dict[str, str], gpus: int, said: str, code: ExitCode) -> None:
    refusal(make_test_plan, make_machine(4, gpus=gpus), environ, match=said, code=code)


def test_user_settings_win_and_are_marked() -> None:
    environ = {"OMP_NUM_THREADS": "2", "GLOO_SOCKET_IFNAME": "eth7", "LAUNCH_NPROC_PER_NODE": "2"}
    made = make_test_plan(make_machine(4), environ)
    assert made.environment.variables["OMP_NUM_THREADS"] == "2"
    assert made.environment.variables["GLOO_SOCKET_IFNAME"] == "eth7"
    assert set(made.environment.user_set) == {"OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"}
    assert reason_for(made, "threads") == "(set by you) OMP_NUM_THREADS=2"
    assert reason_for(made, "GLOO_SOCKET_IFNAME") == "(set by you) GLOO_SOCKET_IFNAME=eth7"
    assert reason_for(made, "ranks") == "(set by you) LAUNCH_NPROC_PER_NODE=2"


def test_more_threads_than_cores_warns() -> None:
    made = make_test_plan(make_machine(2), {"LAUNCH_THREADS": "8"})
    assert made.ranks[0].threads == 8
    assert any("8 threads per rank on 2 cores" in warning for warning in made.warnings)


MASTER = {"MASTER_ADDR": "r1"}
HOSTS = ("r1", "node-1.cluster_a.example.", "10.0.0.1", "fd00::1", "fe80::1%eth0", "localhost")
NO_HOSTS = ("r1\nr2", "r1,r2", "r1 r2", "r1:29500", "[fd00::1]", "tcp://r1", "r1/24", " ")


@pytest.mark.parametrize("job", [Job("hydra", 1, 2, 0, 1), Job("hydra", 1, 2, 1, 2)])
def test_master_that_can_never_resolve_is_refused(job: Job) -> None:
    for name in HOSTS:
        make_test_plan(make_machine(4), {"MASTER_ADDR": name}, job)
    for name in NO_HOSTS:
        refusal(
            make_test_plan,
            make_machine(4),
            {"MASTER_ADDR": name},
            job,
            match=r"^MASTER_ADDR=.*: is no host\. Set it to one name or address, and",
        )
    make_test_plan(make_machine(4), {"MASTER_ADDR": "r1,r2"})  # one node needs none


def test_several_nodes_each_start_their_ranks() -> None:
    environ = {"LAUNCH_NNODES": "3", "LAUNCH_NODE_RANK": "1", "LAUNCH_NPROC_PER_NODE": "2", **MASTER}
    made = make_test_plan(make_machine(4), environ)
    assert (made.nodes.nnodes, made.nodes.node_rank, made.nodes.nproc_per_node, made.launcher) == (3, 1, 2, "local")
    assert made.collective_timeout_s == 60, "one of several nodes may go without a word"
    assert make_test_plan(make_machine(4)).collective_timeout_s == 1800
    assert (made.nodes.world_size, made.rendezvous.master_addr, made.rendezvous.master_port) == (
        6,
        "r1",
        str(port_from_job_id("")),
    )
    assert "2 of the 6" in reason_for(made, "launcher")
    one_each = make_test_plan(make_machine(4), environ | {"LAUNCH_NPROC_PER_NODE": "1"})
    assert one_each.launcher == "local", "a lone rank is watched too"


def test_plan_under_launcher_starts_no_ranks() -> None:
    made = make_test_plan(make_machine(4), job=Job("torchrun", 1, 2, 1, 2))
    assert made.launcher == "rank"
    assert made.nodes.nproc_per_node == 2
    refusal(
        make_test_plan,
        make_machine(4),
        {"LAUNCH_NPROC_PER_NODE": "4"},
        Job("torchrun", 1, 2, 1, 2),
        match="torchrun started",
    )


def test_mask_set_by_launcher_is_not_divided() -> None:
    made = make_test_plan(make_machine(1, online=4), job=Job("Open MPI", 1, 2, 1, 2, cpu_binding=LauncherBinding.USER))
    assert [rank.cpus for rank in made.ranks] == [(0,), (0,)]
    assert reason_for(made, "cores") == "bound by Open MPI"
    assert "OMP_WAIT_POLICY" not in made.environment.variables


@pytest.mark.parametrize(
    ("environ", "versions", "warns"),
    [
        ({"LAUNCH_NPROC_PER_NODE": "2"}, {"torch": "2.15.0"}, True),
        ({"LAUNCH_NNODES": "2", "LAUNCH_NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1"}, {"torch": "2.15.0"}, True),
        ({}, {"torch": "2.15.0"}, False),
        ({"LAUNCH_NPROC_PER_NODE": "2"}, {}, False),
    ],
)
def test_python_without_our_hook_is_named(environ: dict[str, str], versions: dict[str, str], warns: bool) -> None:
    node = replace(make_machine(4), packages=Packages(versions))
    made = make_test_plan(node, environ, interpreter=Interpreter("/other/python", has_hook=False))
    line = "/other/python has no reference_training.pth, so some torch versions may abort at their end"
    assert any(line in warning for warning in made.warnings) == warns


values = st.sampled_from(
    [
        "",
        "auto",
        "0",
        "1",
        "2",
        "7",
        "cpu",
        "cuda",
        "gloo",
        "nccl",
        "logical",
        "physical",
        "threads",
        "none",
        "gnu",
        "x",
    ]
)
names = st.sampled_from(
    [
        *(f"LAUNCH_{field.upper()}" for field in groups_of(LaunchSettings)),
        *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "KMP_AFFINITY", "GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES"),
    ]
)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    launcher = draw(st.sampled_from([None, "torchrun", "Open MPI", "srun"]))
    granted = draw(st.none() | st.integers(1, 300))
    if launcher is None:
        return Job(granted_cpus=granted)
    local, nodes = draw(st.integers(1, 16)), draw(st.integers(1, 3))
    binding = LauncherBinding.NONE if launcher == "torchrun" else draw(st.sampled_from(LauncherBinding))
    return Job(launcher, 0, local * nodes, 0, local, "7", binding, granted, draw(st.none() | st.integers(1, 300)))


@st.composite
def machines_with_gpus(draw: st.DrawFn) -> Machine:
    node = draw(machines())
    count = draw(st.sampled_from([0, 0, 1, 2, 4, 8]))
    links = tuple(tuple(draw(st.sampled_from(["SYS", "PIX", "NV2"])) for _ in range(count)) for _ in range(count))
    gpus = tuple(
        Gpu(index, f"GPU-{index}", "H200", 1 << 37, draw(st.none() | st.integers(0, 9)), links=links[index])
        for index in range(count)
    )
    known = tuple(sorted({cpu.node for cpu in node.cpus if draw(st.booleans())}))
    return replace(
        node, gpus=gpus, memory_nodes=known, packages=Packages({}, draw(st.sampled_from([None, "", "12.8"])))
    )


@pytest.mark.generated
@settings(max_examples=FUZZ_EXAMPLES)
@given(st.dictionaries(names, values, max_size=4), machines_with_gpus(), jobs())
def test_any_settings_and_machine_give_plan_or_error(environ: dict[str, str], node: Machine, job: Job) -> None:
    try:
        made = make_test_plan(node, environ, job)
    except UserError as error:
        assert error.code in (ExitCode.USAGE, ExitCode.MACHINE)
        return
    assert make_test_plan(node, environ, job) == made, "the same input gives the same plan"
    assert Plan.from_json(made.to_json()) == made
    assert len(made.ranks) == made.nodes.nproc_per_node
    assert all(decision.value and decision.text for decision in made.decisions)
    allowed = {cpu.id: cpu for cpu in node.cpus}
    assert all(rank.threads >= 1 and rank.cpus and set(rank.cpus) <= set(allowed) for rank in made.ranks)
    for rank in made.ranks:
        assert set(rank.memory_nodes) <= set(node.memory_nodes)
        assert not rank.memory_nodes or {allowed[cpu].node for cpu in rank.cpus} == set(rank.memory_nodes)
        assert (rank.gpu is not None) is (made.device == "cuda")
    own_threads = any(environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"))
    if (
        not own_threads
        and environ.get("LAUNCH_THREADS", "auto") in ("", "auto")
        and job.cpu_binding == LauncherBinding.NONE
    ):
        limits = [limit for limit in (node.quota_cpus, job.granted_cpus) if limit is not None]
        assert sum(rank.threads for rank in made.ranks) <= max(
            made.nodes.nproc_per_node, min([len(node.cpus), *limits])
        )


def test_plan_of_thousand_ranks_fits_into_variable() -> None:
    made = make_test_plan(make_machine(1024), {"LAUNCH_NPROC_PER_NODE": "1024"})
    assert len(made.to_json()) < 128 << 10
    for text in ("", "{}", "null"):
        with pytest.raises((ValueError, KeyError, TypeError)):
            Plan.from_json(text)


STARTED = Job("srun", 1, 2, 0, 1)


@pytest.mark.parametrize(
    ("job", "environ", "said"),
    [
        (STARTED, {"LAUNCH_LAUNCHER": "direct"}, "LAUNCH_LAUNCHER=direct: srun has already started this process as"),
        (
            replace(STARTED, local_rank=1, local_world_size=2),
            {"LAUNCH_LAUNCHER": "local"},
            "LAUNCH_LAUNCHER=local: srun",
        ),
        (STARTED, {"LAUNCH_LAUNCHER": "mpirun"}, "LAUNCH_LAUNCHER=mpirun: srun has already"),
        (STARTED, {"LAUNCH_HOSTS": "a:1,b:1"}, "LAUNCH_HOSTS=a:1,b:1: srun has already"),
        (Job("Open MPI", 0, 2, 0, 2), {"LAUNCH_LAUNCHER": "srun"}, "LAUNCH_LAUNCHER=srun: Open MPI has already"),
    ],
)
def test_launcher_setting_in_a_started_rank_is_refused(job: Job, environ: dict[str, str], said: str) -> None:
    refusal(make_test_plan, make_machine(4), environ, job, match=said)
    # The ranks of an mpirun or srun that the entrypoint started get the user's settings too.
    assert make_test_plan(make_machine(4), environ | {"ENTRYPOINT_STARTED": "1.0"}, job).launcher == "rank"


@pytest.mark.parametrize(
    ("job", "launcher"),
    [(STARTED, "srun"), (Job("Open MPI", 0, 2, 0, 2), "mpirun"), (Job("hydra (MPICH, Intel MPI)", 0, 1), "direct")],
)
def test_launcher_setting_that_agrees_is_accepted(job: Job, launcher: str) -> None:
    assert make_test_plan(make_machine(4), {"LAUNCH_LAUNCHER": launcher}, job).launcher == "rank"


@pytest.mark.parametrize(
    ("environ", "warning"),
    [
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2"}, "SLURM_NTASKS=2: not used, this run starts 1 rank."),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2", "LAUNCH_NPROC_PER_NODE": "2"}, ""),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "1"}, ""),
        (
            {"LAUNCH_LAUNCHER": "direct", "RANK": "1", "WORLD_SIZE": "2"},
            "WORLD_SIZE=2, RANK=1: not used, LAUNCH_LAUNCHER=direct starts ranks on this node alone",
        ),
        (
            {"LAUNCH_LAUNCHER": "direct", "PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "3"},
            "PET_NNODES=2, PET_NODE_RANK=1, PET_NPROC_PER_NODE=3: not used, LAUNCH_LAUNCHER=direct starts",
        ),
    ],
)
def test_variables_of_other_ranks_without_effect_are_named(environ: dict[str, str], warning: str) -> None:
    lines = make_test_plan(make_machine(4), environ).warnings
    assert [line for line in lines if "not used" in line] == [
        line for line in lines if warning and line.startswith(warning)
    ]
    assert bool(warning) == any("not used" in line for line in lines)


def test_python_of_scripts_is_named_where_the_trainer_runs() -> None:
    warnings = make_plan(
        plan_inputs(make_machine(4), {"LAUNCH_PYTHON": "/usr/bin/python3"}, program=Program("train", ("python",)))
    ).warnings
    said = "LAUNCH_PYTHON=/usr/bin/python3: has no effect, the trainer runs by the launcher's own Python"
    assert said in warnings


@pytest.mark.parametrize(
    ("environ", "mpi", "setting"),
    [
        ({"LAUNCH_LAUNCHER": "mpirun"}, "open-mpi", "LAUNCH_LAUNCHER=mpirun"),
        ({"LAUNCH_LAUNCHER": "srun"}, "", "LAUNCH_LAUNCHER=srun"),
        ({"LAUNCH_HOSTS": "a:1,b:1"}, "open-mpi", "LAUNCH_HOSTS=a:1,b:1"),
    ],
)
def test_variables_that_a_remote_launcher_replaces_are_named(environ: dict[str, str], mpi: str, setting: str) -> None:
    environ = {**environ, "RANK": "1", "WORLD_SIZE": "2"}
    remote = RemoteLauncher("/usr/bin/it", mpi, (("a", 1), ("b", 1)) if mpi else ())
    made = make_plan(plan_inputs(make_machine(4), environ, remote_launcher=remote))
    assert f"WORLD_SIZE=2, RANK=1: not used, {setting} starts all ranks" in made.warnings


@pytest.mark.parametrize("launcher", ["direct", "mpirun", "srun"])
def test_nodes_by_hand_contradict_other_launchers(launcher: str) -> None:
    environ = {"LAUNCH_LAUNCHER": launcher, "LAUNCH_NNODES": "2", **MASTER}
    refusal(
        make_test_plan, make_machine(4), environ, match=f"LAUNCH_LAUNCHER={launcher} and LAUNCH_NNODES=2 contradict"
    )


@pytest.mark.parametrize(
    ("master", "interface"),
    [("127.0.0.1", "lo"), ("node1", "lo"), ("node1.cluster", "lo"), ("", "lo"), ("node7", None), ("10.0.0.7", None)],
)
def test_loopback_is_forced_only_where_the_master_is_here(master: str, interface: str | None) -> None:
    made = make_test_plan(make_machine(4), {"MASTER_ADDR": master}, Job("torchrun", 1, 2, 1, 2))
    assert made.environment.variables.get("GLOO_SOCKET_IFNAME") == interface


@pytest.mark.parametrize(
    ("local_rank", "visible", "gpu"), [(0, 2, 0), (1, 2, 1), (2, 2, 0), (3, 2, 1), (2, 1, 0), (2, 4, 2)]
)
def test_rank_that_sees_fewer_gpus_takes_them_in_turn(local_rank: int, visible: int, gpu: int) -> None:
    shown = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(visible)))}
    job = Job("srun", local_rank, 4, local_rank, 4)
    made = make_test_plan(make_machine(8, gpus=visible), shown, job)
    assert made.ranks[local_rank].gpu == gpu
    assert any("Use --gpus-per-task=1" in line for line in made.warnings) == (visible == 2)


@pytest.mark.parametrize(
    ("each", "cores", "quota", "gpus", "ranks"),
    [("8", 8, None, 0, 1), ("3", 8, 2.5, 0, 1), ("4", 8, None, 0, 4), ("4", 8, None, 4, 4), ("1", 1, None, 0, 1)],
)
def test_kubeflow_default_of_a_rank_per_cpu_is_not_used(
    each: str, cores: int, quota: float | None, gpus: int, ranks: int
) -> None:
    environ = {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "a", "PET_NPROC_PER_NODE": each}
    made = make_test_plan(make_machine(cores, quota=quota, gpus=gpus), environ)
    assert made.nodes.nproc_per_node == ranks
    assert ("Kubeflow's default" in reason_for(made, "ranks")) == (ranks == 1 and each != "1")
