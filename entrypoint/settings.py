"""The launcher's settings: the LAUNCH_* variables."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from entrypoint.core.settings_base import Auto, ParsedSettings, Settings, read_settings

NODE_COUNT = r"[1-9]\d{0,4}|100000"
RANK_LIST = r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?){0,999}"
NODE_RANGE = rf"({NODE_COUNT}):({NODE_COUNT})"

Seconds = Annotated[int, Meta(ge=1, le=86_400)]
Count = Annotated[int, Meta(ge=1, le=4096)]


class LaunchSettings(Settings, frozen=True, kw_only=True):
    """The launcher's settings, each a variable LAUNCH_<NAME> and a flag --<name>."""

    PREFIX: ClassVar[str] = "LAUNCH_"
    # Shown by `--help`; `--help-all` shows every setting.
    BASIC: ClassVar[tuple[str, ...]] = ("device", "nproc_per_node", "threads", "launcher", "hosts", "nnodes", "quiet")

    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Meta(description="Device to train on. auto: CUDA if a GPU and its driver are visible."),
    ] = "auto"
    nproc_per_node: Annotated[
        Auto | Count, Meta(description="Ranks on this node. auto: one per GPU, on CPU one per NUMA node.")
    ] = "auto"
    nnodes: Annotated[
        Annotated[str, Meta(pattern=f"^({NODE_COUNT}|{NODE_RANGE})$", title="a number of nodes or MIN:MAX")],
        Meta(
            description="Number of nodes if no scheduler provides it; run the same command on each."
            " MIN:MAX makes the job elastic."
        ),
    ] = "1"
    node_rank: Annotated[
        Annotated[int, Meta(ge=0, lt=100_000)],
        Meta(description="Number of this node, from 0. MASTER_ADDR names node 0 on all nodes."),
    ] = 0
    launcher: Annotated[
        Literal["auto", "direct", "local", "torchrun", "mpirun", "srun"],
        Meta(
            description="What starts the ranks. auto: the entrypoint itself (local), torchrun for restarts over several"
            " nodes. In Slurm scripts auto is srun, in those of PBS, LSF and Grid Engine and with LAUNCH_HOSTS mpirun."
        ),
    ] = "auto"
    env: Annotated[
        Literal["auto", "torchrun", "none"],
        Meta(
            description="Variables of a single rank. torchrun: RANK, WORLD_SIZE and the others. none: without them,"
            " for scripts that take them for GPUs. auto: torchrun."
        ),
    ] = "auto"
    hosts: Annotated[
        str,
        Meta(description="Nodes for mpirun with the ranks on each, such as r1:4,r2:2, or a file with one per line."),
    ] = ""
    max_restarts: Annotated[
        Auto | Annotated[int, Meta(ge=0, le=1000)],
        Meta(
            description="How often failed ranks restart from the last checkpoint. auto: 3 for an elastic job, else 0."
        ),
    ] = "auto"
    rendezvous_timeout_s: Annotated[
        Seconds, Meta(description="Seconds that ranks wait for each other at the rendezvous.")
    ] = 1800
    secret_file: Annotated[
        str,
        Meta(
            description="File with a secret that all nodes of a job read. Monitors on other nodes without it cannot"
            " take part in the job's failure channel."
        ),
    ] = ""
    collective_timeout_s: Annotated[
        Auto | Seconds,
        Meta(description="Seconds that a collective may take. auto: 60 on several nodes, 1800 on one."),
    ] = "auto"
    grace_period_s: Annotated[
        Seconds,
        Meta(
            description="Seconds a rank has to write a checkpoint after a stop request."
            " Also subtracted from the end time of a Slurm job."
        ),
    ] = 30
    gpus: Annotated[
        Auto | Annotated[int, Meta(ge=1, le=64)],
        Meta(
            description="GPUs to use, one rank each, the best connected ones. auto: all visible GPUs."
            " CUDA_VISIBLE_DEVICES selects specific ones."
        ),
    ] = "auto"
    threads: Annotated[
        Auto | Count, Meta(description="OpenMP threads per rank. auto: the rank's share of the physical cores.")
    ] = "auto"
    core_type: Annotated[
        Literal["auto", "performance", "physical", "logical"],
        Meta(
            description="Cores to use. auto: physical cores, on a hybrid CPU its performance cores."
            " logical adds hyper-threads."
        ),
    ] = "auto"
    backend: Annotated[
        Literal["auto", "gloo", "ccl", "nccl", "mpi"],
        Meta(description="Backend for collectives. auto: nccl on CUDA, gloo on CPU."),
    ] = "auto"
    cpu_binding: Annotated[
        Literal["auto", "ranks", "threads", "none"],
        Meta(
            description="CPU binding. ranks pins each rank to its own cores, threads also pins each OpenMP thread,"
            " none disables it. auto: ranks."
        ),
    ] = "auto"
    memory_binding: Annotated[
        Literal["auto", "bind", "preferred", "default"],
        Meta(
            description="Memory of a rank inside one NUMA node. auto binds it there, preferred allows other nodes,"
            " default does nothing."
        ),
    ] = "auto"
    openmp: Annotated[
        Literal["auto", "intel", "gnu"],
        Meta(description="OpenMP runtime. auto: Intel's by preload, on Intel CPUs where it is installed."),
    ] = "auto"
    allocator: Annotated[
        Literal["auto", "tcmalloc", "jemalloc", "system"],
        Meta(description="Memory allocator. auto: tcmalloc by preload where it is installed, else the system's."),
    ] = "auto"
    reserve_cpus: Annotated[
        Auto | Annotated[int, Meta(ge=0, le=4096)],
        Meta(
            description="CPUs to leave free for other processes. auto: as many as are busy, unless a scheduler"
            " allocated this node."
        ),
    ] = "auto"
    oversubscribe: Annotated[bool, Meta(description="Allow more ranks than cores; they then share cores.")] = False
    tuning_store: Annotated[
        str, Meta(description="Folder with results of `entrypoint tune`. auto: the user's cache folder. off: not used.")
    ] = "auto"
    quiet: Annotated[bool, Meta(description="Do not print the plan before a launch.")] = False
    log_dir: Annotated[
        str,
        Meta(
            description="Folder for a file with the output of each rank:"
            " attempt_0/RANK/stdout.log and stderr.log; a restart writes attempt_1."
            " torchrun's agent puts a folder of its own around them."
        ),
    ] = ""
    log_prefix: Annotated[bool, Meta(description="Print [rank N] before each line of a rank.")] = False
    log_ranks: Annotated[
        Annotated[str, Meta(pattern=rf"^({RANK_LIST})?$", title="a list of ranks like 0,8-11")],
        Meta(description="Ranks to show, such as 0,8; the others print to files alone. Needs LAUNCH_LOG_DIR."),
    ] = ""


def read_launch_settings(environ: Mapping[str, str], flags: Mapping[str, str]) -> ParsedSettings[LaunchSettings]:
    """Validate LAUNCH_* and the launcher's flags; raises `UserError`."""
    return read_settings(LaunchSettings, environ, flags)
