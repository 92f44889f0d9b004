"""Slurm's own ways with a job: its time limit, preemption, requeueing, arrays and jobs of several parts."""

from __future__ import annotations

import json
import re
import time

import pytest

from tests.cluster.batch_scripts import FILES, LONG, SHORT, installed as installed, output, wait_for
from tests.cluster.conftest import ENTRYPOINT, Slurm, in_all
from tests.conftest import script

pytestmark = [pytest.mark.cluster, pytest.mark.slurm]

# Jobs of several parts want the backfill scheduler; a partition of a higher tier takes nodes from the other one.
MORE = """
    set -e
    sed -i 's,SchedulerType=.*,SchedulerType=sched/backfill,; s/^SchedulerParameters=.*/&,bf_interval=1/' "$SLURM_CONF"
    printf '%s\\n' PreemptType=preempt/partition_prio PreemptMode=REQUEUE \\
      'PartitionName=urgent Nodes=ALL PriorityTier=10 OverSubscribe=NO MaxTime=INFINITE State=UP' >>"$SLURM_CONF"
    pid=$(cat "$(dirname "$SLURM_CONF")/run/slurmctld.pid")
    kill "$pid"
    while kill -0 "$pid" 2>/dev/null; do sleep 0.1; done
    slurmctld -f "$SLURM_CONF"
    until sinfo --noheader >/dev/null 2>&1; do sleep 0.1; done
    scontrol reconfigure
"""


@pytest.fixture
def more(slurm: Slurm) -> Slurm:
    """A Slurm with a partition that preempts the other, and jobs of several parts."""
    slurm.run("bash", script(slurm.cluster.folder, "more.sh", MORE)).succeeded()
    return slurm


def goes_on(slurm: Slurm, job: str, saved: str) -> None:
    """Check that a job saved, was started again by Slurm, and went on from the very step that it saved."""
    wait_for(slurm.cluster, job, saved)
    wait_for(slurm.cluster, job, "resuming from runs/job/checkpoint/step-", 120)
    assert slurm.state(job)["Restarts"] == "1"
    text = output(slurm.cluster, job)
    steps = [int(step) for step in re.findall(r"step[ -]0*(\d+)(?: is saved|,)", text)]
    assert steps[0] == steps[1], text[-3000:]
    slurm.run("scancel", job)


# Seconds after the step has started: before Python runs, at the rendezvous, while ranks import, and in training.
MOMENTS = (0.0, 0.4, 0.8, 1.2, 1.6, 2.0, 3.0, 4.0, 6.0, 8.0)


@pytest.mark.parametrize("moment_s", [pytest.param(at, marks=() if at == 0.4 else in_all) for at in MOMENTS])
def test_warning_at_any_moment_queues_the_job_again(slurm: Slurm, installed: dict[str, str], moment_s: float) -> None:
    array = ("--array=3",) if moment_s == 0.4 else ()
    job = slurm.submit(FILES / "slurm/train.sbatch", *array, env=LONG | installed)
    until = time.monotonic() + 180
    while f"{job}.0" not in slurm.run("squeue", "--steps", "--noheader", "--format=%i").out.replace("_3.", "."):
        assert time.monotonic() < until, "the step did not start"
        time.sleep(0.05)
    time.sleep(moment_s)
    slurm.run("scancel", "--signal=USR1", job)
    wait_for(slurm.cluster, "*", "goes back into the queue")
    while slurm.state(job)["JobState"] != "RUNNING":
        assert time.monotonic() < until, output(slurm.cluster, "*")
        time.sleep(0.2)
    assert slurm.state(job)["Restarts"] == "1"
    wait_for(slurm.cluster, "*", "epoch 1/")
    slurm.run("scancel", job)


def test_preempted_job_saves_and_resumes_afterwards(more: Slurm, installed: dict[str, str]) -> None:
    job = more.submit(FILES / "slurm/train.sbatch", env=LONG | installed)
    wait_for(more.cluster, job, "epoch 3/")
    urgent = script(more.cluster.folder, "urgent.sh", "#!/bin/sh\nsleep 3\n")
    more.submit(urgent, "--partition=urgent", "--nodes=2", "--ntasks-per-node=2", "--output=urgent.out")
    goes_on(more, job, "preempted: stopped by SIGTERM: step ")


def test_array_jobs_run_concurrently(slurm: Slurm, installed: dict[str, str]) -> None:
    env = {name: value for name, value in SHORT.items() if name != "TRAIN_RUN_NAME"} | installed
    array = slurm.submit(FILES / "slurm/train.sbatch", "--array=0-1", "--cpus-per-task=1", env=env)
    jobs = {slurm.ended(f"{array}_{index}")["JobId"] for index in (0, 1)}
    texts = [path.read_text() for path in slurm.cluster.folder.glob("train-*.out")]
    assert len(jobs) == len(texts) == 2
    for job in jobs:
        assert slurm.cluster.summary(f"job-{job}")["world_size"] == 2, texts


PARTS = """\
#!/bin/sh
#SBATCH --nodes=1 --ntasks=1 --cpus-per-task=2 --output=parts.out
#SBATCH hetjob
#SBATCH --nodes=1 --ntasks=2 --cpus-per-task=1
"""


def test_heterogeneous_job_ranks_are_one_job(more: Slurm) -> None:
    command = f"srun --het-group=0,1 {' '.join(ENTRYPOINT)} train"
    more.ended(more.submit(script(more.cluster.folder, "parts.sh", f"{PARTS}{command}\n"), env=SHORT))
    assert more.cluster.summary("job")["world_size"] == 3, (more.cluster.folder / "parts.out").read_text()
    assert '"rank": 2' in (more.cluster.folder / "runs/job/ranks.json").read_text()


# As enroot's hook 50-slurm-pytorch.sh and many centers' pages have it: all but LOCAL_WORLD_SIZE.
WRAPPER = """\
#!/bin/sh
export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS MASTER_ADDR=node1 MASTER_PORT=61007
exec "$@"
"""


@pytest.mark.parametrize("shape", [("-N2", "-n2"), ("-N2", "-n4")])
def test_wrapper_that_exports_rank_variables_changes_nothing(slurm: Slurm, shape: tuple[str, str]) -> None:
    wrapper = script(slurm.cluster.folder, "wrap.sh", WRAPPER)
    wrapper.chmod(0o755)
    options = (*shape, "--cpus-per-task=1", "--cpu-bind=none", "--kill-on-bad-exit=1")
    env = {**SHORT, "TRAIN_TENSORBOARD": "0", "TRAIN_PROGRESS": "plain"}
    slurm.run("srun", *options, wrapper, *ENTRYPOINT, "train", env=env).succeeded()
    assert slurm.cluster.summary("job")["world_size"] == int(shape[1][2:])
    assert "started by srun on this node" in (slurm.cluster.folder / "runs/job/plan.json").read_text()


FAILS = """
    import os, sys, time

    if os.environ["RANK"] == "1":
        sys.exit(7)
    time.sleep(600)
"""


@pytest.mark.parametrize("shape", [("-N1", "-n2"), ("-N2", "-n2")])
def test_failed_task_ends_step_without_kill_on_bad_exit(slurm: Slurm, shape: tuple[str, str]) -> None:
    script(slurm.cluster.folder, "x.py", FAILS)
    options = (*shape, "--cpus-per-task=1", "--cpu-bind=none", "--kill-on-bad-exit=0")
    one = slurm.start("srun", *options, *ENTRYPOINT, "run", "--quiet", "x.py")
    assert one.code(60) == 7, one.text()
    assert re.search(r"rank 1 on node\d failed first: exit code 7", one.text())


def test_interactive_shell_of_several_nodes_starts_srun(slurm: Slurm) -> None:
    """The shell of `salloc` on the first node, with the step's variables that use_interactive_step sets."""
    step = "SLURM_STEP_ID=4294967290 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_STEP_NUM_TASKS=1"
    shell = f"env {step} SLURM_STEP_TASKS_PER_NODE=1 SLURM_STEP_NODELIST=node1 {' '.join(ENTRYPOINT)}"
    options = ("-N2", "-n2", "--cpus-per-task=2")
    slurm.run("salloc", *options, "sh", "-c", f"{shell} train", env=SHORT).succeeded()
    assert slurm.cluster.summary("job")["world_size"] == 2
    alone = slurm.run(
        "salloc", *options, "sh", "-c", f"{shell} plan --launcher direct", env=SHORT | {"TRAIN_RUN_NAME": "alone"}
    )
    assert "(set by you) --launcher=direct" in " ".join(alone.out.split())


# Nodes have two GPUs by name only. The file's own options must leave room for the number of CPUs of a GPU.
GPUS = [
    (("--gpus-per-task=1",), "", "", 2),
    (("--gpus-per-task=1", "--cpus-per-gpu=2"), " --cpus-per-task=2", "", 2),
    (("--gpus-per-task=1", "--cpus-per-gpu=1"), "--ntasks-per-node=1 --cpus-per-task=2", "--ntasks-per-node=2", 4),
]


@pytest.mark.parametrize(("options", "old", "new", "world_size"), GPUS)
def test_ranks_with_a_gpu_each_are_one_job(
    slurm: Slurm, installed: dict[str, str], options: tuple[str, ...], old: str, new: str, world_size: int
) -> None:
    text = (FILES / "slurm/train.sbatch").read_text()
    adapted = script(slurm.cluster.folder, "train.sbatch", text.replace(old, new))
    job = slurm.submit(adapted, *options, env=SHORT | installed | {"LAUNCH_DEVICE": "cpu"})
    state = slurm.ended(job)
    assert (state["JobState"], state["ExitCode"]) == ("COMPLETED", "0:0"), output(slurm.cluster, job)
    assert re.search("gpu[:=]1", state["TresPerTask"]), "24.11 writes it another way"
    assert slurm.cluster.summary("job")["world_size"] == world_size
    ranks = json.loads((slurm.cluster.folder / "runs/job/ranks.json").read_text())
    assert {len(one["cpus"]) for one in ranks} == {4 // world_size}, "the CPUs of a task"


@pytest.mark.parametrize("file", ["train.sbatch", "train-mpi.sbatch"])
def test_exclusive_nodes_without_numbers_of_tasks_and_cpus(slurm: Slurm, installed: dict[str, str], file: str) -> None:
    text = (FILES / "slurm" / file).read_text().replace(" --ntasks-per-node=1 --cpus-per-task=2", "")
    adapted = script(slurm.cluster.folder, file, text)
    job = slurm.submit(adapted, "--exclusive", env=SHORT | installed)
    state = slurm.ended(job)
    assert (state["JobState"], state["ExitCode"]) == ("COMPLETED", "0:0"), output(slurm.cluster, job)
    assert slurm.cluster.summary("job")["world_size"] == 2


def test_suspended_job_goes_on(slurm: Slurm) -> None:
    """It is stopped for longer than the launcher waits for a signal, and for less than the limit of a collective."""
    words = ("srun", "-N2", "-n2", "-c2", "--job-name=suspended", *ENTRYPOINT, "train")
    started = slurm.start(*words, env={"TRAIN_EPOCHS": "100000"})
    started.wait_for("epoch 2/")
    (job,) = slurm.run("squeue", "--noheader", "--name=suspended", "--format=%A").out.split()
    for verb in ("suspend", "resume"):
        slurm.run("scontrol", verb, job).succeeded()
        time.sleep(5)
    last = max(int(epoch) for epoch in re.findall(r"^epoch (\d+)/", started.text(), re.MULTILINE))
    started.wait_for(f"epoch {last + 2}/")
