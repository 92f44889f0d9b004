"""The launcher's settings: the LAUNCH_* variables."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from entrypoint.core.setting_types import PathText, WordOrPath, about
from entrypoint.core.settings_base import Auto, ParsedSettings, Settings, read_settings

NODE_COUNT = r"[1-9]\d{0,4}|100000"
RANK_LIST = r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?){0,999}"
NODE_RANGE = rf"({NODE_COUNT}):({NODE_COUNT})"

Seconds = Annotated[int, Meta(ge=1, le=86_400)]
Count = Annotated[int, Meta(ge=1, le=4096)]


class LaunchSettings(Settings, frozen=True, kw_only=True):
    """The launcher's settings, each a variable LAUNCH_<NAME> and a flag --<name>."""

    PREFIX: ClassVar[str] = "LAUNCH_"

    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        about("Device to train on. auto: CUDA if a GPU and its driver are visible.", basic=True),
    ] = "auto"
    python: Annotated[
        PathText,
        about(
            "Python that runs your script. Unset: the active environment's (VIRTUAL_ENV, CONDA_PREFIX), else the"
            " launcher's own if it has torch, else the one on PATH."
        ),
    ] = ""
    nproc_per_node: Annotated[
        Auto | Count,
        about(
            "Ranks on this node. auto: one per GPU, on CPU one per NUMA node."
            " Fewer ranks than GPUs use the best connected ones. CUDA_VISIBLE_DEVICES selects specific ones.",
            basic=True,
        ),
    ] = "auto"
    nnodes: Annotated[
        Annotated[str, Meta(pattern=f"^({NODE_COUNT}|{NODE_RANGE})$", title="a number of nodes or MIN:MAX")],
        about(
            "Number of nodes if no scheduler provides it; run the same command on each. MIN:MAX makes the job elastic.",
            basic=True,
        ),
    ] = "1"
    node_rank: Annotated[
        Annotated[int, Meta(ge=0, lt=100_000)],
        about("Number of this node, from 0. MASTER_ADDR names node 0 on all nodes."),
    ] = 0
    launcher: Annotated[
        Literal["auto", "direct", "local", "torchrun", "mpirun", "srun"],
        about(
            "What starts the ranks. auto: the entrypoint itself (local), torchrun for restarts over several"
            " nodes. In Slurm scripts auto is srun, in those of PBS, LSF and Grid Engine and with LAUNCH_HOSTS mpirun.",
            basic=True,
        ),
    ] = "auto"
    env: Annotated[
        Literal["auto", "torchrun", "none"],
        about(
            "Variables of a single rank. torchrun: RANK, WORLD_SIZE and the others. none: without them,"
            " for scripts that take them for GPUs. auto: torchrun."
        ),
    ] = "auto"
    hosts: Annotated[
        Annotated[str, Meta(title="nodes or a path")],
        about("Nodes for mpirun with the ranks on each, such as r1:4,r2:2, or a file with one per line.", basic=True),
    ] = ""
    max_restarts: Annotated[
        Auto | Annotated[int, Meta(ge=0, le=1000)],
        about(
            "How often failed ranks restart from the last checkpoint. auto: 3 for an elastic job, else 0.", speed=False
        ),
    ] = "auto"
    rendezvous_timeout_s: Annotated[
        Seconds, about("Seconds that ranks wait for each other at the rendezvous.", speed=False)
    ] = 1800
    secret_file: Annotated[
        PathText,
        about(
            "File with a secret that all nodes of a job read. A host without it cannot join the job.",
            speed=False,
        ),
    ] = ""
    collective_timeout_s: Annotated[
        Auto | Seconds,
        about("Seconds that a collective may take. auto: 60 on several nodes, 1800 on one.", speed=False),
    ] = "auto"
    grace_period_s: Annotated[
        Seconds,
        about(
            "Seconds a rank has to write a checkpoint after a stop request."
            " Also subtracted from the end time of a Slurm job.",
            speed=False,
        ),
    ] = 30
    threads: Annotated[
        Auto | Count, about("OpenMP threads per rank. auto: the rank's share of the physical cores.", basic=True)
    ] = "auto"
    core_type: Annotated[
        Literal["auto", "performance", "physical", "logical"],
        about("Cores to use. auto: physical cores, on a hybrid CPU its performance cores. logical adds hyper-threads."),
    ] = "auto"
    backend: Annotated[
        Literal["auto", "gloo", "ccl", "nccl", "mpi"],
        about("Backend for collectives. auto: nccl on CUDA, gloo on CPU."),
    ] = "auto"
    cpu_binding: Annotated[
        Literal["auto", "ranks", "threads", "none"],
        about(
            "CPU binding. ranks pins each rank to its own cores, and one inside a NUMA node to its memory; threads also"
            " pins each OpenMP thread; none disables it. auto: ranks."
        ),
    ] = "auto"
    openmp: Annotated[
        Literal["auto", "intel", "gnu"],
        about("OpenMP runtime. auto: Intel's by preload, on Intel CPUs where it is installed."),
    ] = "auto"
    allocator: Annotated[
        Literal["auto", "tcmalloc", "jemalloc", "system"],
        about("Memory allocator. auto: tcmalloc by preload where it is installed, else the system's."),
    ] = "auto"
    reserve_cpus: Annotated[
        Auto | Annotated[int, Meta(ge=0, le=4096)],
        about(
            "CPUs to leave free for other processes. auto: as many as are busy, if at most half are. None where a"
            " scheduler allocated this node."
        ),
    ] = "auto"
    oversubscribe: Annotated[bool, about("Allow more ranks than cores; they then share cores.")] = False
    tuning_store: Annotated[
        WordOrPath,
        about("Folder with results of `entrypoint tune`. auto: the user's cache folder. off: not used.", speed=False),
    ] = "auto"
    quiet: Annotated[bool, about("Do not print the plan before a launch.", basic=True, speed=False)] = False
    log_dir: Annotated[
        PathText,
        about(
            "Folder for a file with the output of each rank:"
            " attempt_0/RANK/stdout.log and stderr.log; a restart writes attempt_1."
            " torchrun's agent puts a folder of its own around them.",
            speed=False,
        ),
    ] = ""
    log_prefix: Annotated[bool, about("Print [rank N] before each line of a rank.", speed=False)] = False
    log_ranks: Annotated[
        Annotated[str, Meta(pattern=rf"^({RANK_LIST})?$", title="a list of ranks like 0,8-11")],
        about("Ranks to show, such as 0,8; the others print to files alone. Needs LAUNCH_LOG_DIR.", speed=False),
    ] = ""


def read_launch_settings(environ: Mapping[str, str], flags: Mapping[str, str]) -> ParsedSettings[LaunchSettings]:
    """Validate LAUNCH_* and the launcher's flags; raises `UserError`."""
    return read_settings(LaunchSettings, environ, flags)
