"""The plan on machines that are not here, as an expert would write it, and what is left to others on a shared node."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from entrypoint.core.errors import ExitCode
from entrypoint.job.detect import Job, LauncherBinding
from entrypoint.machine.cpu_topology import format_cpu_list
from entrypoint.plan.model import Plan, RankPlan
from entrypoint.plan.planner import make_plan
from tests.conftest import refusal
from tests.factories import make_machine, make_test_plan, plan_inputs, reason_for, simulated_machine


def shares(made: Plan) -> list[str]:
    return [format_cpu_list(rank.cpus) for rank in made.ranks]


@pytest.mark.parametrize(
    ("name", "environ", "cpus", "threads"),
    [
        ("VM of 1 CPU", {}, ["0"], 1),
        ("VM of 2 CPUs", {}, ["0-1"], 2),
        ("VM of 2 CPUs", {"LAUNCH_NPROC_PER_NODE": "2"}, ["0", "1"], 1),
        ("hybrid laptop", {}, ["0,2,4,6,8,10"], 6),
        ("hybrid laptop", {"LAUNCH_CORE_TYPE": "physical"}, ["0,2,4,6,8,10,12-19"], 14),
        ("hybrid laptop", {"LAUNCH_CORE_TYPE": "logical"}, ["0-19"], 20),
        ("Arm big.LITTLE", {}, ["4-7"], 4),
        ("2-socket Xeon, siblings adjacent", {}, [format_cpu_list(tuple(range(0, 56, 2))),
                                                  format_cpu_list(tuple(range(56, 112, 2)))], 28),
        ("2-socket Xeon, siblings interleaved", {}, ["0-27", "28-55"], 28),
        ("2-socket Xeon, siblings interleaved", {"LAUNCH_CORE_TYPE": "logical"}, ["0-27,56-83", "28-55,84-111"], 56),
        ("2-socket Xeon, siblings interleaved", {"LAUNCH_NPROC_PER_NODE": "1"}, ["0-55"], 56),
        ("2-socket Xeon, siblings interleaved", {"LAUNCH_NPROC_PER_NODE": "4"},
         ["0-13", "14-27", "28-41", "42-55"], 14),
        ("2-socket Xeon, SNC-4", {}, [f"{14 * node}-{14 * node + 13}" for node in range(8)], 14),
        ("2-socket EPYC, NPS4", {}, [f"{16 * node}-{16 * node + 15}" for node in range(8)], 16),
        ("2-socket EPYC 7742", {}, ["0-63", "64-127"], 64),
        ("2-socket EPYC 7742", {"LAUNCH_NPROC_PER_NODE": "32"},
         [f"{4 * place}-{4 * place + 3}" for place in range(32)], 4),
        ("2-socket EPYC 9654", {"LAUNCH_NPROC_PER_NODE": "24"},
         [f"{8 * place}-{8 * place + 7}" for place in range(24)], 8),
        ("2-socket Xeon 8480+, SNC-4", {}, [f"{14 * node}-{14 * node + 13}" for node in range(8)], 14),
        ("2-socket Xeon 6780E", {}, ["0-143", "144-287"], 144),
        ("Graviton 4", {}, ["0-95"], 96),
        ("Grace", {}, ["0-71"], 72),
        ("desktop with P- and E-cores", {}, ["0,2,4,6,8,10,12,14"], 8),
        ("desktop with P- and E-cores", {"LAUNCH_CORE_TYPE": "physical"}, ["0,2,4,6,8,10,12,14,16-31"], 24),
        ("2-socket Arm without SMT", {}, ["0-63", "64-127"], 64),
        ("Slurm step with a cpuset", {}, ["4-7"], 4),
        ("1,024 CPUs", {}, [f"{64 * node}-{64 * node + 63}" for node in range(8)], 64),
        ("nodes with gaps", {}, ["0,4,8,12,16,20,24,28", "32,36,40,44,48,52,56,60"], 8),
        ("offline siblings", {"LAUNCH_CORE_TYPE": "logical"}, ["0-7"], 8),
    ],
)  # fmt: skip
def test_default_plan_has_one_rank_per_numa_node(
    name: str, environ: Mapping[str, str], cpus: list[str], threads: int
) -> None:
    made = make_test_plan(simulated_machine(name), environ)
    assert shares(made) == cpus
    assert {rank.threads for rank in made.ranks} == {threads}


def test_quota_3_5_gives_one_rank_three_threads() -> None:
    made = make_test_plan(simulated_machine("Kubernetes pod with quota 3.5"))
    assert [rank.threads for rank in made.ranks] == [3]
    assert len(made.ranks[0].cpus) == 32, "a quota limits time, not places"
    assert "cgroup limit 3.5 CPUs" in reason_for(made, "cores")
    assert made.environment.variables["OMP_WAIT_POLICY"] == "passive"
    refusal(
        make_test_plan,
        simulated_machine("Kubernetes pod with quota 3.5"),
        {"LAUNCH_NPROC_PER_NODE": "4"},
        match=r"more ranks than cores: .* cgroup limit 3\.5 CPUs",
        code=ExitCode.MACHINE,
    )


def test_memory_is_bound_if_a_rank_is_in_one_node_with_memory() -> None:
    made = make_test_plan(simulated_machine("2-socket Xeon, siblings interleaved"))
    assert [rank.memory_nodes for rank in made.ranks] == [(0,), (1,)]
    assert next(one.value for one in made.decisions if one.key == "memory") == "bind 0-1"
    gaps = simulated_machine("nodes with gaps")
    assert [rank.memory_nodes for rank in make_test_plan(gaps).ranks] == [(0,), ()], "node 8 has no memory"
    wide = make_test_plan(simulated_machine("2-socket Xeon, siblings interleaved"), {"LAUNCH_NPROC_PER_NODE": "1"})
    assert wide.ranks[0].memory_nodes == ()
    assert "first touch" in reason_for(wide, "memory")


def test_gpu_ranks_get_cores_near_their_gpu() -> None:
    made = make_test_plan(simulated_machine("8-GPU NVLink node"))
    assert shares(made) == ["0-4", "5-9", "10-14", "15-19", "20-24", "25-29", "30-34", "35-39"]
    assert [rank.gpu for rank in made.ranks] == list(range(8))
    assert [rank.memory_nodes for rank in made.ranks] == [(0,)] * 4 + [(1,)] * 4
    assert "near each rank's GPU" in reason_for(made, "cores")
    assert made.environment.variables["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert made.binding.core_map == (
        "socket 0 node 0: 00000111112222233333  GPU 0,1,2,3",
        "socket 1 node 1: 44444555556666677777  GPU 4,5,6,7",
    )


@pytest.mark.parametrize(
    ("count", "gpus", "cpus"),
    [(1, "0", ["0-19"]), (2, "0,3", ["0-9", "10-19"]), (4, "0,1,2,3", ["0-4", "5-9", "10-14", "15-19"])],
)
def test_fewer_ranks_select_best_connected_gpus(count: int, gpus: str, cpus: list[str]) -> None:
    made = make_test_plan(simulated_machine("8-GPU NVLink node"), {"LAUNCH_NPROC_PER_NODE": str(count)})
    assert made.nodes.nproc_per_node == count
    assert shares(made) == cpus
    uuids = ",".join(f"GPU-{int(gpu):08x}" for gpu in gpus.split(","))
    assert made.environment.variables["CUDA_VISIBLE_DEVICES"] == uuids
    assert next(decision.value for decision in made.decisions if decision.key == "gpus") == gpus
    assert [rank.gpu for rank in made.ranks] == list(range(count)), "counted among those that are left visible"


def test_nvswitch_gpus_are_equally_connected() -> None:
    made = make_test_plan(simulated_machine("8-GPU NVSwitch node"), {"LAUNCH_NPROC_PER_NODE": "2"})
    assert reason_for(made, "gpus") == "the best connected: NV18"


def test_old_driver_falls_back_to_cpu_only_on_auto() -> None:
    old = simulated_machine("8-GPU NVLink node")
    old = replace(old, driver=replace(old.driver, version="550.90", cuda="12.4"))
    old = replace(old, packages=replace(old.packages, torch_cuda="13.0"))
    made = make_test_plan(old)
    assert made.device == "cpu"
    assert any(
        "the driver 550.90 supports CUDA up to 12.4, and torch is built for 13.0" in line for line in made.warnings
    )
    refusal(
        make_test_plan,
        old,
        {"LAUNCH_DEVICE": "cuda"},
        match=r"LAUNCH_DEVICE=cuda: the driver 550\.90 supports CUDA up to 12\.4",
        code=ExitCode.MACHINE,
    )


def test_cpu_build_of_torch_ignores_gpus() -> None:
    node = simulated_machine("8-GPU NVLink node")
    made = make_test_plan(replace(node, packages=replace(node.packages, torch_cuda="", versions={"torch": "2.8.0"})))
    assert (made.device, made.nodes.nproc_per_node) == ("cpu", 2)
    assert any("built for the CPU. Use the CUDA image" in line for line in made.warnings)


def test_srun_rank_uses_its_visible_gpu() -> None:
    made = make_test_plan(make_machine(8, gpus=1), job=Job("srun", 3, 4, 3, 4))
    assert [rank.gpu for rank in made.ranks] == [0, 0, 0, 0]
    refusal(
        make_test_plan,
        make_machine(8, gpus=2),
        job=Job("srun", 3, 4, 3, 4),
        match="srun started 4 ranks on this node, which has 2 visible GPUs",
        code=ExitCode.MACHINE,
    )


def test_slurm_grant_limits_without_mask() -> None:
    made = make_test_plan(make_machine(16), job=Job(granted_cpus=4, node_cpus=4))
    assert made.ranks[0].threads == 4
    assert "Slurm grants 4 CPUs" in reason_for(made, "cores")


def test_srun_rank_with_one_cpu_warns_with_command() -> None:
    job = Job("srun", 0, 2, 0, 2, cpu_binding=LauncherBinding.USER, granted_cpus=16, node_cpus=16)
    made = make_test_plan(make_machine(1, online=16), job=job)
    assert any("srun --cpus-per-task=8" in line for line in made.warnings)
    full = replace(job, node_cpus=2)
    assert make_test_plan(make_machine(1, online=16), job=full).warnings == ()


def test_socket_bound_to_several_ranks_is_split_among_them() -> None:
    made = make_test_plan(
        make_machine(28, online=56), job=Job("Open MPI", 5, 8, 5, 8, cpu_binding=LauncherBinding.USER)
    )
    assert made.ranks[5].threads == 7
    assert "about 4 ranks share them" in reason_for(made, "cores")


def test_uneven_numa_nodes_get_one_rank_over_all() -> None:
    node = make_machine(11)
    uneven = replace(node, cpus=tuple(replace(cpu, node=int(cpu.id == 10)) for cpu in node.cpus), memory_nodes=(0, 1))
    made = make_test_plan(uneven)
    assert made.nodes.nproc_per_node == 1
    assert "NUMA nodes have 1 to 10 cores" in reason_for(made, "ranks")


def test_mkl_num_threads_sets_threads() -> None:
    made = make_test_plan(make_machine(4), {"MKL_NUM_THREADS": "3"})
    assert made.ranks[0].threads == 3
    assert reason_for(made, "threads") == "(set by you) MKL_NUM_THREADS=3"
    assert made.environment.variables["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(("limit", "threads", "reason"), [("1", 1, "OMP_THREAD_LIMIT=1"), ("64", 8, "share")])
def test_thread_limit_of_openmp_counts(limit: str, threads: int, reason: str) -> None:
    made = make_test_plan(make_machine(8), {"OMP_THREAD_LIMIT": limit})
    assert [rank.threads for rank in made.ranks] == [threads]
    assert reason in reason_for(made, "threads")


def test_threads_above_the_limit_contradict_it() -> None:
    refusal(
        make_test_plan,
        make_machine(8),
        {"OMP_THREAD_LIMIT": "2", "OMP_NUM_THREADS": "4"},
        match=r"^OMP_NUM_THREADS=4 and OMP_THREAD_LIMIT=2 contradict",
    )


LEFT = {
    "not quite one": (make_machine(4), 0.79, {}, [4]),
    "one": (make_machine(4), 0.81, {}, [3]),
    "one and a half of another": (make_machine(4), 1.5, {}, [3]),
    "half of the CPUs": (make_machine(4), 2.0, {}, [2]),
    "more, where fewer threads are no better": (make_machine(4), 2.9, {}, [4]),
    "one of two": (make_machine(2), 1.0, {}, [1]),
    "both of two": (make_machine(2), 2.0, {}, [2]),
    "the only one": (make_machine(1), 1.0, {}, [1]),
    "as many from each rank": (make_machine(8), 1.0, {"LAUNCH_NPROC_PER_NODE": "2"}, [3, 3]),
    "three of two ranks": (make_machine(8), 3.0, {"LAUNCH_NPROC_PER_NODE": "2"}, [2, 2]),
    "ranks of one CPU": (make_machine(2), 1.0, {"LAUNCH_NPROC_PER_NODE": "2"}, [1, 1]),
    "a quota that fits next to them": (make_machine(8, quota=2), 3.0, {}, [2]),
    "a quota that fits next to many": (make_machine(8, quota=2), 6.0, {}, [2]),
    "a quota that does not": (make_machine(8, quota=6), 3.0, {}, [5]),
    "a user's own threads": (make_machine(4), 1.0, {"LAUNCH_THREADS": "4"}, [4]),
    "nothing by a user": (make_machine(4), 1.0, {"LAUNCH_RESERVE_CPUS": "0"}, [4]),
    "some by a user": (make_machine(4), 0.0, {"LAUNCH_RESERVE_CPUS": "3"}, [1]),
    "a scheduler's node": (make_machine(4), 1.0, {}, [4], Job(granted_cpus=4, hostnames=("n1",))),
    "ranks of mpirun": (make_machine(4), 1.0, {}, [2, 2], Job("Open MPI", 0, 2, 0, 2)),
    "one node of several": (make_machine(4), 1.0, {"LAUNCH_NNODES": "2", "MASTER_ADDR": "n1"}, [4]),
    "a GPU's rank": (make_machine(4, gpus=1), 1.0, {}, [4]),
}

TOO_MANY = ("more, where fewer threads are no better", "both of two", "the only one", "ranks of one CPU")


@pytest.mark.parametrize("case", LEFT)
def test_busy_cpus_are_reserved(case: str) -> None:
    node, busy, environ, threads, *job = LEFT[case]
    made = make_test_plan(replace(node, busy_cpus=busy), environ, *job)
    alone = make_test_plan(
        node, {name: value for name, value in environ.items() if name != "LAUNCH_RESERVE_CPUS"}, *job
    )
    assert [rank.threads for rank in made.ranks] == threads
    fewer = threads != [rank.threads for rank in alone.ranks]
    assert [rank.cpus for rank in made.ranks] == [rank.cpus for rank in alone.ranks], "still bound to all"
    assert ("less: " in reason_for(made, "threads")) == fewer
    assert any("`entrypoint tune`" in line for line in made.warnings) == (case in TOO_MANY)
    assert made.binding.reserved_cpus >= fewer


@pytest.mark.parametrize("busy", [0.0, 2.0])
def test_resumed_run_keeps_threads_on_same_cores(busy: float) -> None:
    def resumed(cores: int, environ: dict[str, str] | None = None) -> list[int]:
        node = replace(make_machine(cores), busy_cpus=busy)
        first = make_test_plan(make_machine(4))
        ranks, binding = (RankPlan(0, (0, 1, 2, 3), 3),), replace(first.binding, reserved_cpus=1)
        before = replace(first, ranks=ranks, binding=binding)
        made = make_plan(plan_inputs(node, environ, previous=before))
        return [rank.threads for rank in made.ranks]

    assert resumed(4) == [3]
    assert resumed(8) == [8 - int(busy)], "other cores are planned again"
    assert resumed(4, {"LAUNCH_RESERVE_CPUS": "0"}) == [4]
    assert resumed(4, {"LAUNCH_THREADS": "2"}) == [2]


@pytest.mark.parametrize(("environ", "threads"), [({}, 6), ({"LAUNCH_CORE_TYPE": "physical"}, 12)])
def test_unused_cores_are_reserved_first(environ: dict[str, str], threads: int) -> None:
    made = make_test_plan(replace(simulated_machine("hybrid laptop"), busy_cpus=2.0), environ)
    assert made.ranks[0].threads == threads


def test_reserving_all_cpus_raises() -> None:
    refusal(
        make_test_plan,
        make_machine(4),
        {"LAUNCH_RESERVE_CPUS": "4"},
        match="LAUNCH_RESERVE_CPUS=4: leaves no CPU to a rank that has 4",
        code=ExitCode.MACHINE,
    )
