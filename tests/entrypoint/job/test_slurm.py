"""Slurm's lists of hosts, and what its variables say of this node, with environments dumped from Slurm 22.05."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from entrypoint.core.errors import UserError
from entrypoint.job.detect import detect_job
from entrypoint.job.slurm import expand_hostlist, expand_per_node_count, granted_cpus, job_cpus, slurm_tasks_here
from tests.conftest import refusal

# sbatch -N1 -n2 -c1, the second task of its srun.
STEP = {
    "SLURM_CPUS_ON_NODE": "2", "SLURM_CPUS_PER_TASK": "1", "SLURM_CPU_BIND": "quiet,mask_cpu:0x1,0x2",
    "SLURM_CPU_BIND_LIST": "0x1,0x2", "SLURM_CPU_BIND_TYPE": "mask_cpu:", "SLURM_JOB_CPUS_PER_NODE": "2",
    "SLURM_JOB_ID": "2", "SLURM_LOCALID": "1", "SLURM_NODEID": "0", "SLURM_NTASKS": "2", "SLURM_PROCID": "1",
    "SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_TASKS_PER_NODE": "2",
}  # fmt: skip
# sbatch -N1 -n1 -c2, the batch script itself.
BATCH = {
    "SLURM_CPUS_ON_NODE": "2", "SLURM_CPUS_PER_TASK": "2", "SLURM_JOB_CPUS_PER_NODE": "2", "SLURM_JOB_ID": "1",
    "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_TASKS_PER_NODE": "1",
}  # fmt: skip


@pytest.mark.parametrize(("text", "node", "tasks"), [("2(x3),1", 0, 2), ("2(x3),1", 3, 1), ("4", 0, 4), ("1,3", 1, 3)])
def test_slurm_tasks_here_counts_this_node(text: str, node: int, tasks: int) -> None:
    assert slurm_tasks_here({"SLURM_STEP_TASKS_PER_NODE": text, "SLURM_NODEID": str(node)}) == tasks


def test_expand_per_node_count_large_counts_is_fast() -> None:
    assert expand_per_node_count("X", ",".join(["2(x999999)"] * 5000), 10**8) == 2


def test_step_with_fewer_tasks_than_nodes_raises() -> None:
    step = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_NODES": "2"}
    refusal(detect_job, step, match="^SLURM_STEP_NUM_NODES=2: .* SLURM_NTASKS says 1. Set SLURM_NTASKS")


def test_job_cpus_malformed_list_raises() -> None:
    refusal(
        job_cpus,
        BATCH | {"SLURM_JOB_CPUS_PER_NODE": "2(y3)"},
        match=r"SLURM_JOB_CPUS_PER_NODE=2\(y3\): cannot be read; expected a form like",
    )


@pytest.mark.parametrize(
    ("environ", "granted", "of_job"),
    [
        ({}, None, None),
        ({"SLURM_CPUS_ON_NODE": "8"}, None, None),
        (BATCH, 2, 2),
        (STEP, 2, 2),
        (STEP | {"SLURM_JOB_CPUS_PER_NODE": "16(x2),8", "SLURM_NODEID": "2"}, 2, 8),
    ],
)
def test_granted_cpus_outside_a_job_is_none(environ: dict[str, str], granted: int | None, of_job: int | None) -> None:
    assert (granted_cpus(environ), job_cpus(environ)) == (granted, of_job)


LISTS = {
    "login": ["login"],
    "node1,node2": ["node1", "node2"],
    "node[01-03,7],gpu-[1-2]-ib[0,3],login": [
        *("node01", "node02", "node03", "node7"),
        *("gpu-1-ib0", "gpu-1-ib3", "gpu-2-ib0", "gpu-2-ib3", "login"),
    ],
    "n[9-11]": ["n9", "n10", "n11"],
    "n[098-101]": ["n098", "n099", "n100", "n101"],
    "[1-2]": ["1", "2"],
    "a.b-c[0]": ["a.b-c0"],
}


@pytest.mark.parametrize("text", LISTS)
def test_expand_hostlist_keeps_order(text: str) -> None:
    assert list(expand_hostlist(text)) == LISTS[text]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        *(
            (text, "cannot be read; expected a form like")
            for text in ("", "a,,b", "a,", "a[1-3", "a[]", "a[1-]", "a[1;2]", "a 1", "a]", "a{}", f"a[{'1' * 19}]")
        ),
        ("node[3-1]", "the range 3-1 runs backwards"),
        ("node[1-9999999999]", "more than 1,000,000 nodes"),
        ("a[1-9999][1-9999]", "more than 1,000,000 nodes"),
    ],
)
def test_expand_hostlist_malformed_raises(text: str, why: str) -> None:
    refusal(expand_hostlist, text, "SLURM_JOB_NODELIST", match=rf"^SLURM_JOB_NODELIST.*: .*{why}")


def test_expand_hostlist_long_list_is_fast() -> None:
    names = expand_hostlist(",".join(f"rack{rack}-[0000-0999]" for rack in range(200)))
    assert len(set(names)) == 200_000
    assert (names[0], names[-1]) == ("rack0-0000", "rack199-0999")


@given(st.lists(st.tuples(st.from_regex(r"[a-z][a-z0-9.-]{0,6}", fullmatch=True), st.integers(0, 10**6)), min_size=1))
def test_expand_hostlist_round_trip_returns_names(names: list[tuple[str, int]]) -> None:
    flat = [f"{name}x{number:04}" for name, number in names]
    assert list(expand_hostlist(",".join(f"{name}x[{number:04}]" for name, number in names))) == flat
    assert list(expand_hostlist(",".join(flat))) == flat


@given(st.text("abn01-,[]. ", max_size=20))
def test_expand_hostlist_any_text_returns_names_or_raises(text: str) -> None:
    try:
        names = expand_hostlist(text)
    except UserError as refused:
        assert str(refused).startswith("node list")
    else:
        assert all(names)
        assert "[" not in "".join(names)
