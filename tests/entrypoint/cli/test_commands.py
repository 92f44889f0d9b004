"""The entrypoint as people run it: real processes, real ranks, real exit codes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.conftest import PYTHON, Entrypoint, Result, intel_openmp, launcher, needs_two_cores, script

CONSOLE_COMMAND = Path(sys.executable).with_name("entrypoint")

pytestmark = pytest.mark.launch

# The shape of the book's scripts: plain env:// rendezvous, a DistributedSampler, DDP.
BOOK_SCRIPT = """
    import json, os, sys
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset
    from torch.utils.data.distributed import DistributedSampler

    dist.init_process_group(backend="gloo", init_method="env://")
    rank = dist.get_rank()
    data = TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    reported = dict(rank=rank, size=dist.get_world_size(), steps=len(loader), argv=sys.argv[1:],
                cpus=sorted(os.sched_getaffinity(0)), threads=torch.get_num_threads(),
                weights=[p.detach().flatten().tolist() for p in model.parameters()])
    open(f"rank{rank}.json", "w").write(json.dumps(reported))
    dist.destroy_process_group()
"""


@needs_two_cores
def test_books_script_runs_unchanged_on_two_bound_ranks(entrypoint: Entrypoint) -> None:
    script(entrypoint.folder, "book.py", BOOK_SCRIPT)
    # Arguments that torchrun's own parser would take for its own.
    arguments = ["--nnodes", "--rdzv", "x", "--lr=3", "-m"]
    entrypoint.succeed("run", "--nproc-per-node", "2", "book.py", *arguments)
    first, second = (json.loads((entrypoint.folder / f"rank{rank}.json").read_text()) for rank in range(2))
    assert (first["size"], second["size"]) == (2, 2)
    assert first["argv"] == second["argv"] == arguments
    assert first["steps"] == second["steps"] == 4
    assert first["weights"] == second["weights"]
    planned = entrypoint.plan("--nproc-per-node", "2")["ranks"]
    assert [first["cpus"], second["cpus"]] == [rank["cpus"] for rank in planned]
    assert not set(first["cpus"]) & set(second["cpus"])
    assert [first["threads"], second["threads"]] == [rank["threads"] for rank in planned]


def test_module_runs_from_current_folder(entrypoint: Entrypoint) -> None:
    (entrypoint.folder / "pkg").mkdir()
    script(entrypoint.folder / "pkg", "tool.py", "import sys; print('tool', sys.argv[1:])")
    result = entrypoint("run", "-m", "pkg.tool", "a", "--b")
    assert result.out == "tool ['a', '--b']\n"


@pytest.mark.slow_except(".-command0")
@pytest.mark.parametrize("command", [(PYTHON, "-m", "entrypoint"), (str(CONSOLE_COMMAND),)])
@pytest.mark.parametrize("pythonpath", ["", "."])
def test_user_script_train_py_is_not_the_trainer(
    entrypoint: Entrypoint, command: tuple[str, ...], pythonpath: str
) -> None:
    script(entrypoint.folder, "train.py", "print('the user\\'s own train.py')")
    script(entrypoint.folder, "script.py", "import train")
    env = {"PYTHONPATH": pythonpath, "TRAIN_EPOCHS": "1", "TRAIN_TENSORBOARD": "0"}
    ours = entrypoint("train", env=env, command=command)
    assert "test accuracy" in ours.out
    assert "user's own" not in ours.out + ours.err
    for arguments in (["train.py"], ["-m", "train"], ["script.py"]):
        theirs = entrypoint("run", *arguments, env=env | {"LAUNCH_QUIET": "1"}, command=command)
        assert (theirs.out, theirs.err) == ("the user's own train.py\n", ""), arguments


@needs_two_cores
@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        ("sys.exit(7)", 7, "rank 1 of this job (local rank 1, pid {pid}) failed first, with exit code 7"),
        ("os.kill(os.getpid(), 9)", 5, "rank 1 of this job (local rank 1, pid {pid}) failed first: killed by SIGKILL"),
        ("raise ValueError('mine')", 1, "rank 1 of this job (local rank 1, pid {pid}) failed first, with exit code 1"),
    ],
)
def test_dead_rank_ends_the_job_with_its_code_and_no_orphan(
    entrypoint: Entrypoint, ending: str, code: int, said: str
) -> None:
    result = entrypoint.run_script(
        f"""
        import os, sys, time
        rank = os.environ["RANK"]
        open(f"pid{{rank}}", "w").write(str(os.getpid()))
        while not os.path.exists("pid0"):
            time.sleep(0.01)
        if rank == "1":
            {ending}
        time.sleep(60)
        """,
        "--nproc-per-node=2",
    )
    pids = [int((entrypoint.folder / f"pid{rank}").read_text()) for rank in range(2)]
    assert result.code == code
    assert result.err.splitlines()[-1].startswith("entrypoint: error: " + said.format(pid=pids[1]))
    assert "ChildFailedError" not in result.err
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_plan_command_starts_nothing(entrypoint: Entrypoint) -> None:
    script(entrypoint.folder, "x.py", "open('started', 'w')")
    for arguments in (["plan", "run", "x.py"], ["run", "--dry-run", "x.py"]):
        result = entrypoint.succeed(*arguments)
        assert "one rank with all cores" in result.out
        assert "would run: " in result.out
    assert not (entrypoint.folder / "started").exists()
    assert entrypoint("train", "--dry-run").code == 0
    assert not (entrypoint.folder / "runs").exists()


def test_plan_json_has_documented_keys(entrypoint: Entrypoint) -> None:
    plan = entrypoint.plan()
    assert list(plan) == [
        *("version", "launcher", "nodes", "rendezvous", "ranks", "binding", "environment", "device", "backend"),
        *("collective_timeout_s", "grace_period_s", "program", "command", "trainer", "output", "decisions"),
        *("warnings", "prominent_warning", "machine"),
    ]
    assert plan["version"] == 2
    assert {"local_rank", "cpus", "threads"} <= set(plan["ranks"][0])
    assert all({"key", "value", "reason", "source", "setting"} == set(decision) for decision in plan["decisions"])
    assert {"data source", "loader workers"} <= {decision["key"] for decision in plan["decisions"]}


@pytest.mark.parametrize(
    ("arguments", "env", "code", "said"),
    [
        (["train"], {"TRAIN_EPOCH": "3"}, 2, "TRAIN_EPOCH=3: no such variable. Did you mean TRAIN_EPOCHS?"),
        (["plan"], {"LAUNCH_NPROC": "3"}, 2, "LAUNCH_NPROC=3: no such variable. Did you mean LAUNCH_NPROC_PER_NODE?"),
        (["train"], {"TRAIN_EPOCHS": "0"}, 2, "TRAIN_EPOCHS=0: not a whole number from 1 to 1,000,000."),
        (["train"], {"LAUNCH_NPROC_PER_NODE": "4096"}, 3, "LAUNCH_NPROC_PER_NODE=4096: more ranks than cores"),
        (["train"], {"LAUNCH_DEVICE": "cuda", "CUDA_VISIBLE_DEVICES": ""}, 3, "LAUNCH_DEVICE=cuda: no GPU is visible"),
        (["run", "nowhere.py"], {}, 2, "nowhere.py: no such script"),
        (
            ["train"],
            {"TRAIN_DATASET": "imagefolder", "TRAIN_DATA_DIR": "/nowhere"},
            2,
            "TRAIN_DATA_DIR=/nowhere: no such",
        ),
        (
            ["train"],
            {"TRAIN_DATA_SOURCE": "stream"},
            2,
            "TRAIN_DATA_SOURCE=stream: only imagefolder, csv and shards can be streamed",
        ),
        (
            ["train"],
            {"TRAIN_GRAD_ACCUM_STEPS": "65"},
            2,
            "TRAIN_BATCH_SIZE=64: too small for 1 rank x 65 micro-batches",
        ),
        *(
            (
                [command],
                {"TRAIN_OUTPUT_DIR": "/dev/null/x"},
                2,
                "TRAIN_OUTPUT_DIR=/dev/null/x: cannot be written (Not a directory). Set it to a writable folder.",
            )
            for command in ("plan", "train")
        ),
        (
            ["plan", "--output-dir", "/dev/null"],
            {},
            2,
            "--output-dir=/dev/null: cannot be written (Not a directory)",
        ),
        (["rank"], {}, 2, "ENTRYPOINT_PLAN: holds no plan."),
    ],
)
def test_bad_input_gives_one_line_and_documented_code(
    entrypoint: Entrypoint, arguments: list[str], env: dict[str, str], code: int, said: str
) -> None:
    result = entrypoint(*arguments, env=env)
    assert result.code == code
    assert len(result.err.splitlines()) == 1
    assert result.err.startswith(f"entrypoint: error: {said}")
    assert result.out == ""


def test_run_ignores_train_variables_of_script(entrypoint: Entrypoint) -> None:
    assert entrypoint.run_script("import os; print(os.environ['TRAIN_MY_OWN'])", env={"TRAIN_MY_OWN": "7"}).out == "7\n"


@needs_two_cores
@pytest.mark.versions
@pytest.mark.parametrize("own", [{}, pytest.param({"OMP_NUM_THREADS": "1"}, marks=pytest.mark.slow)])
def test_run_under_user_torchrun_starts_no_ranks(entrypoint: Entrypoint, own: dict[str, str]) -> None:
    script(
        entrypoint.folder,
        "x.py",
        """
        import os
        facts = os.environ["WORLD_SIZE"], os.environ["OMP_NUM_THREADS"], sorted(os.sched_getaffinity(0))
        open("rank" + os.environ["RANK"], "w").write(str(facts))
        """,
    )
    command = (PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "entrypoint")
    result = entrypoint.succeed("run", "x.py", command=command, env=own)
    for rank, planned in enumerate(entrypoint.plan("--nproc-per-node=2", env=own)["ranks"]):
        facts = ("2", str(planned["threads"]), planned["cpus"])
        assert (entrypoint.folder / f"rank{rank}").read_text() == str(facts)
    assert result.err.count("plan: ") == 1
    assert ("(set by you) OMP_NUM_THREADS=1" in result.err) is bool(own), "torchrun's one thread is nobody's wish"


@pytest.mark.slow_except("none")
@needs_two_cores
@pytest.mark.openmpi
@pytest.mark.parametrize("bind", ["none", "core"])
def test_open_mpi_ranks_on_one_node_train(entrypoint: Entrypoint, bind: str) -> None:
    mpirun = launcher("mpirun.openmpi", "mpirun", said="Open MPI")
    script(entrypoint.folder, "book.py", BOOK_SCRIPT)
    command = (mpirun, "--allow-run-as-root", "--bind-to", bind, "-np", "2", PYTHON, "-m", "entrypoint")
    check_two_ranks(entrypoint, entrypoint("run", "book.py", command=command))


@needs_two_cores
@pytest.mark.hydra
def test_hydra_ranks_on_one_node_train(entrypoint: Entrypoint) -> None:
    mpiexec = launcher("mpiexec.hydra", said="HYDRA")
    script(entrypoint.folder, "book.py", BOOK_SCRIPT)
    check_two_ranks(entrypoint, entrypoint("run", "book.py", command=(mpiexec, "-np", "2", PYTHON, "-m", "entrypoint")))


def check_two_ranks(entrypoint: Entrypoint, result: Result) -> None:
    """Check that the book's script ran as two ranks, each on a core and a thread of its own, from one plan."""
    assert result.code == 0, result.err
    assert result.err.count("plan: ") == 1
    first, second = (json.loads((entrypoint.folder / f"rank{rank}.json").read_text()) for rank in range(2))
    assert (first["size"], second["size"]) == (2, 2)
    assert first["weights"] == second["weights"]
    assert len(first["cpus"]) == len(second["cpus"]) == 1
    assert first["cpus"] != second["cpus"]
    assert first["threads"] == second["threads"] == 1


def test_cpu_binding_none_leaves_rank_unbound(entrypoint: Entrypoint) -> None:
    result = entrypoint.run_script(
        "import os; print(sorted(os.sched_getaffinity(0)))", "--cpu-binding=none", "--nproc-per-node=1"
    )
    assert result.out == f"{sorted(os.sched_getaffinity(0))}\n"
    assert "not bound" in result.err


IN_CHARGE = """
    import ctypes
    import torch

    class Found(ctypes.Structure):
        _fields_ = [("file", ctypes.c_char_p), ("base", ctypes.c_void_p), ("symbol", ctypes.c_char_p),
                    ("address", ctypes.c_void_p)]

    here = ctypes.CDLL(None)
    found = Found()
    here.dladdr(ctypes.cast(here.GOMP_parallel, ctypes.c_void_p), ctypes.byref(found))
    print(found.file.decode())
    print(*sorted({line.split()[-1] for line in open("/proc/self/maps") if "malloc" in line}))
"""


@pytest.mark.parametrize(("openmp", "library"), [("intel", "libiomp5"), ("gnu", "libgomp")])
def test_requested_openmp_runtime_is_active(entrypoint: Entrypoint, openmp: str, library: str) -> None:
    if openmp == "intel":
        intel_openmp()
    result = entrypoint.run_script(IN_CHARGE, "--openmp", openmp).succeeded()
    assert Path(result.out.splitlines()[0]).name.startswith(library)


@pytest.mark.parametrize("allocator", ["tcmalloc", "jemalloc"])
def test_requested_allocator_is_loaded_or_raises(entrypoint: Entrypoint, allocator: str) -> None:
    result = entrypoint.run_script(IN_CHARGE, "--allocator", allocator)
    if result.code == 3:
        assert f"--allocator={allocator}: not in " in result.error_lines[0]
    else:
        assert f"lib{allocator}" in result.out.splitlines()[1]


INNER = """
    import subprocess, sys
    words = (sys.executable, "-m", "entrypoint")
    for more in (("plan", "--epochs=x"), ("run", "nothere.py"), ("train", "--max-minutes=0.001", "--epochs=99")):
        done = subprocess.run([*words, *more], capture_output=True, text=True)
        print(done.returncode, done.stderr.splitlines()[-1])
"""


@pytest.mark.parametrize("more", [(), pytest.param(("--launcher=torchrun",), marks=pytest.mark.slow)])
def test_command_inside_a_rank_reports_its_own_end(entrypoint: Entrypoint, more: tuple[str, ...]) -> None:
    result = entrypoint.succeed("run", "--quiet", *more, script(entrypoint.folder, "outer.py", INNER))
    lines = result.out.splitlines()
    assert [line.split()[0] for line in lines] == ["2", "2", "75"], result.out
    assert "--epochs=x" in lines[0]
    assert "nothere.py" in lines[1]
    assert "step 1 is saved" in lines[2]
