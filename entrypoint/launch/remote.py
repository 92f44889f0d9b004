"""Starts ranks on other nodes too: the commands of mpirun and srun, from a batch script or a list of machines."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping

from msgspec.structs import replace

from entrypoint.core.console import RESULT_VAR, STATUS_VAR
from entrypoint.core.errors import ExitCode, UserError, is_secret, printable, refuse_if
from entrypoint.core.files import exists, is_folder, read_regular
from entrypoint.core.process import own_command
from entrypoint.job.allocation import ALLOCATION_VAR
from entrypoint.job.detect import Job
from entrypoint.job.job_key import JOB_KEY_VAR
from entrypoint.job.node_group import JOB_TOKEN_VAR, START_TIME_VAR
from entrypoint.job.slurm import number
from entrypoint.plan.environment import USER_OVERRIDABLE
from entrypoint.plan.inputs import PlanInputs, RemoteLauncher
from entrypoint.plan.key_decision import DRAWN_HERE
from entrypoint.plan.model import Plan
from entrypoint.plan.remote_ranks import node_count, ranks_per_host, starts_ranks_here, world_size_for
from entrypoint.settings import LaunchSettings

VERSION_LIMIT_S = 20
# What has mpirun reach other nodes by something else than ssh: a scheduler, or a user's word.
SSH_ALTERNATIVES = (
    "SLURM_JOB_ID",
    "OMPI_MCA_plm_rsh_agent",
    "PRTE_MCA_plm_ssh_agent",  # Open MPI 5's
    "HYDRA_LAUNCHER_EXEC",
    "HYDRA_LAUNCHER",
    "I_MPI_HYDRA_BOOTSTRAP",
)
HOST = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,252})(?:(?::| +slots *= *)([1-9][0-9]{0,3}))?")
# What ranks on other nodes get: our settings and what steers threads, networks and devices. Nothing else of a
# user's environment goes over the network, where it may hold secrets.
FORWARDED_PREFIXES = (
    "LAUNCH_",
    "TRAIN_",
    "OMP_",
    "KMP_",
    "GOMP_",
    "MKL_",
    "GLOO_",
    "NCCL_",
    "CCL_",
    "FI_",
    "UCX_",
    "TORCH_",
    "I_MPI_",
    "ACCELERATE_",
)
FORWARDED_NAMES = (
    "PATH",
    "MASTER_ADDR",
    "MASTER_PORT",
    "CUDA_VISIBLE_DEVICES",
    START_TIME_VAR,
    ALLOCATION_VAR,
    RESULT_VAR,
)
# Without both, Open MPI's mpirun refuses root (mpirun(1)).
ROOT_CONSENTS = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
# A node that does not answer for so long is lost, and mpirun ends the job (Open MPI's oob_tcp parameters; ssh_config).
TCP_KEEPALIVE = (("time", "10"), ("intvl", "5"), ("probes", "4"))


def select_remote_launcher(values: LaunchSettings, job: Job, nodes: int) -> str:
    """Return what is to start the ranks (`mpirun`, `srun`), empty where this node's are all, or are started."""
    if job.launcher or nodes > 1:
        return ""
    if values.launcher in ("mpirun", "srun"):
        return values.launcher
    if values.launcher == "auto":
        several = len(job.hostnames) > 1 or job.het_components > 1
        return "mpirun" if values.hosts or (several and job.scheduler != "Slurm") else "srun" if several else ""
    return ""


def find_remote_launcher(
    values: LaunchSettings, job: Job, nodes: int, environ: Mapping[str, str]
) -> RemoteLauncher | None:
    """Look for what is to start the ranks; None where nothing is. Raises `UserError` where it is not here."""
    name = select_remote_launcher(values, job, nodes)
    if not name:
        return None
    refuse_if(
        {
            f"this batch job has {job.het_components} parts, which srun from here would not start alike; write: srun"
            f" --het-group=0-{job.het_components - 1} entrypoint …, or set LAUNCH_LAUNCHER=direct for this node"
            " alone": (name == "srun" and job.het_components > 1),
            f"this LSF job has {len(job.hostnames)} nodes, and here jsrun starts ranks on them. Write: jsrun -n RANKS"
            " -a 1 -c CPUS entrypoint train, or set LAUNCH_LAUNCHER=direct for this node alone.": (
                name == "mpirun" and job.scheduler == "LSF" and not values.hosts and shutil.which("jsrun")
            ),
        }
    )
    hosts, path = read_hosts(values.hosts), shutil.which(name)
    if not path:
        asked_by = f"LAUNCH_HOSTS={printable(values.hosts)}" if values.launcher == "auto" else f"LAUNCH_LAUNCHER={name}"
        raise UserError(not_found_message(name, job, asked_by), ExitCode.MACHINE)
    mpi, major = detect_mpi(path) if name == "mpirun" else ("", 0)
    reaches = len(hosts) < 2 or any(environ.get(name) for name in SSH_ALTERNATIVES) or shutil.which("ssh")
    consents = os.geteuid() or all(environ.get(name) == "1" for name in ROOT_CONSENTS)
    refuse_if(
        {
            f"LAUNCH_HOSTS={printable(values.hosts)}: no ssh is here to reach {''.join(host for host, _ in hosts[1:2])}"
            " with. Inside a container, start it from outside: mpirun … apptainer exec IMAGE entrypoint …": not reaches,
            f"{path}: Open MPI does not start as root. Set {'=1 and '.join(ROOT_CONSENTS)}=1, or be another user.": (
                mpi == "Open MPI" and not consents
            ),
        },
        ExitCode.MACHINE,
    )
    return RemoteLauncher(path, mpi, hosts, major)


def not_found_message(name: str, job: Job, asked_by: str) -> str:
    """Say what to write where a starter is not here, as inside most containers."""
    line = "srun apptainer exec IMAGE entrypoint …" if name == "srun" else "mpirun … apptainer exec IMAGE entrypoint …"
    if (name == "srun" or job.scheduler != "Slurm") and len(job.hostnames) > 1:
        return (
            f"this batch script has {len(job.hostnames)} nodes ({job.hostnames[0]} …) and no {name} is here to start"
            f" ranks on them; write: {line}, or set LAUNCH_LAUNCHER=direct for this node alone"
        )
    return f"{asked_by}: no {name} on PATH here; inside a container start it from outside: {line}"


def detect_mpi(path: str) -> tuple[str, int]:
    """Return whose mpirun this is by its version text, and Open MPI's major version (0: not said).

    Raises `UserError` where it is neither Open MPI's nor hydra.
    """
    import subprocess  # here, because most plans start no process

    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=VERSION_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{path}: --version does not answer ({type(error).__name__})", ExitCode.MACHINE) from None
    text = done.stdout + done.stderr
    if "Open MPI" in text or "OpenRTE" in text:
        version = re.search(r"(?:Open MPI|OpenRTE)\)? +v?(\d+)\.", text)
        return "Open MPI", int(version[1]) if version else 0
    if "HYDRA" in text or "Intel(R) MPI" in text:
        return "hydra", 0
    first = (text.splitlines() or ["nothing"])[0]
    raise UserError(
        f"{path}: --version says {printable(first)}, neither Open MPI nor MPICH's or Intel's hydra", ExitCode.MACHINE
    )


def read_hosts(text: str) -> tuple[tuple[str, int], ...]:
    """Return each host with its ranks (0: as many as here) of `r1:4,r2:2`, or of a file with a line for each.

    A file may also have Open MPI's form, `r1 slots=4`. Raises `UserError` naming what cannot be read.
    """
    if not text:
        return ()
    is_list = "/" not in text and (is_folder(text) or not exists(text))  # a folder may have the name of a host
    try:
        lines = text.split(",") if is_list else read_regular(text).splitlines()
    except OSError as error:
        raise UserError(f"LAUNCH_HOSTS={printable(text)}: cannot be read ({error.strerror})") from None
    entries = [line.partition("#")[0].strip() for line in lines]
    hosts = []
    for entry in entries if is_list else filter(None, entries):
        match = HOST.fullmatch(entry)
        if not match:
            raise UserError(
                f"LAUNCH_HOSTS={printable(text)}: {printable(entry)} is no host; expected a form like r1:4,r2:2"
            )
        hosts.append((match[1], int(match[2] or 0)))
    if not hosts:
        raise UserError(f"LAUNCH_HOSTS={printable(text)}: names no host")
    return tuple(hosts)


def with_remote_command(plan: Plan, inputs: PlanInputs) -> Plan:
    """Return the plan with the command of mpirun or srun, if one starts the ranks.

    Each rank makes its own plan on its node, so only the user's own settings go along, flags included.
    """
    starter = inputs.remote_launcher
    if starter is None:
        return plan
    flags = inputs.settings.as_variables() | {
        name: value for name, value in plan.environment.variables.items() if name.startswith("TRAIN_")
    }
    script = inputs.program.kind != "train"
    verb = ("run", *inputs.program.argv[1:]) if script else ("train",)
    again = own_command(*verb, python=inputs.python)
    if script and inputs.program.argv[0] != inputs.python:  # which the other nodes would not find by themselves
        flags["LAUNCH_PYTHON"] = inputs.program.argv[0]
    environ = {**inputs.environ, **flags}
    if plan.rendezvous.key_source == DRAWN_HERE:
        environ[JOB_KEY_VAR] = ""  # the launch draws it
    if not starter.mpi:
        count, command = srun(inputs, starter, plan.nodes.nproc_per_node, again)
    else:
        hosts = ranks_per_host(inputs, plan.nodes.nproc_per_node)
        count = sum(ranks for _, ranks in hosts)
        flags |= rendezvous_hints(inputs, hosts)
        command = (open_mpi if starter.mpi == "Open MPI" else hydra)(environ, starter, hosts, again)
        if withheld := withheld_variables(environ):
            note = f"{', '.join(withheld)}: not passed to other nodes, because the name is that of a secret"
            plan = replace(plan, warnings=(*plan.warnings, note))
    nodes = replace(plan.nodes, nnodes=node_count(inputs), min_nodes=node_count(inputs), world_size=count)
    environment = replace(plan.environment, variables=flags)
    plan = replace(plan, nodes=nodes, command=command, environment=environment)
    return plan if starts_ranks_here(inputs) else without_this_node(plan)


def without_this_node(plan: Plan) -> Plan:
    """Return the plan without the decisions about this node's CPUs and libraries: the ranks are on other nodes."""
    kept = tuple(decision for decision in plan.decisions if decision.key not in (*NODE_DECISIONS, *USER_OVERRIDABLE))
    note = "the ranks are on other nodes; each of them plans its own cores, threads and libraries"
    binding = replace(plan.binding, core_map=())
    return replace(plan, ranks=(), binding=binding, decisions=kept, warnings=(*plan.warnings, note))


NODE_DECISIONS = ("cores", "threads", "memory", "gpus", "openmp", "allocator")


def rendezvous_hints(inputs: PlanInputs, hosts: tuple[tuple[str, int], ...]) -> dict[str, str]:
    """Return what mpirun's ranks get besides the user's variables: where rank 0 is, and which run this is."""
    first = first_host(inputs, hosts) if len(hosts) > 1 else "127.0.0.1"
    variables = {"MASTER_ADDR": first, JOB_TOKEN_VAR: inputs.job.job_id or inputs.run_token}
    return {name: value for name, value in variables.items() if not inputs.environ.get(name)}


def first_host(inputs: PlanInputs, hosts: tuple[tuple[str, int], ...]) -> str:
    """Return the host of rank 0: the list's first one; Open MPI 4 puts its own node first (seen with 4.1)."""
    starter = inputs.remote_launcher
    if starter and starter.mpi == "Open MPI" and starter.major < FIRST_WITH_PRRTE:
        here = inputs.machine.hostname.partition(".")[0]
        return next((name for name, _ in hosts if name.partition(".")[0] == here), hosts[0][0])
    return hosts[0][0]


def srun(
    inputs: PlanInputs, starter: RemoteLauncher, nproc: int, again: tuple[str, ...]
) -> tuple[int, tuple[str, ...]]:
    """Return the tasks and srun's command: as many as the job asked for, each with its CPUs, bound by us.

    Since Slurm 22.05 srun takes no --cpus-per-task from its job, and would leave a task one CPU (its release notes).
    """
    nodes, tasks = node_count(inputs), world_size_for(inputs, nproc)
    cpus = number(inputs.environ, "SLURM_CPUS_PER_TASK", 0)
    if inputs.settings.values.max_restarts not in ("auto", 0):  # then a task is a node's agent
        tasks, cpus = nodes, 0
    cpus = cpus or max(1, (inputs.job.node_cpus or 1) // -(-tasks // nodes))
    limits: tuple[str, ...] = (f"--nodes={nodes}", f"--ntasks={tasks}", f"--cpus-per-task={cpus}")
    if inputs.environ.get("SLURM_PTY_PORT"):  # the step of `srun --pty` holds the CPUs that the new step needs
        limits += ("--overlap",)
    return tasks, (starter.path, *limits, "--cpu-bind=none", "--kill-on-bad-exit=1", *again)


def open_mpi(
    environ: Mapping[str, str], starter: RemoteLauncher, hosts: tuple[tuple[str, int], ...], again: tuple[str, ...]
) -> tuple[str, ...]:
    """Return Open MPI's command; it binds nothing, since its own binding knows nothing of threads (mpirun(1))."""
    names = [word for name in forwarded_variables(environ) for word in ("-x", name)]
    alive = [word for name, value in TCP_KEEPALIVE for word in ("--mca", f"oob_tcp_keepalive_{name}", value)]
    where = ("--host", ",".join(f"{name}:{count}" for name, count in hosts))
    count = str(sum(count for _, count in hosts))
    agent = launch_agent(environ, starter.major)
    return (starter.path, "--bind-to", "none", "-np", count, *where, *alive, *agent, *names, *again)


def launch_agent(environ: Mapping[str, str], major: int) -> tuple[str, ...]:
    """Return how Open MPI's daemon is started on other nodes from inside Apptainer: in the same image there.

    Outside it they may have no Open MPI, or another one (APPTAINER_* of Apptainer's user guide). Open MPI 5 has PRRTE's
    parameter and daemon, and ignores those of version 4 (prte_launch_agent of `prte_info --all`).
    """
    option, variable, daemon = LAUNCH_AGENT_5 if major >= FIRST_WITH_PRRTE else LAUNCH_AGENT_4
    image = environ.get("APPTAINER_CONTAINER", "")
    if not image or environ.get(variable):
        return ()
    gpus = " --nv" if environ.get("APPTAINER_NV") else ""
    return (option, variable.partition("_MCA_")[2], f"apptainer exec{gpus} {image} {daemon}")


FIRST_WITH_PRRTE = 5
LAUNCH_AGENT_4 = ("--mca", "OMPI_MCA_orte_launch_agent", "orted")
LAUNCH_AGENT_5 = ("--prtemca", "PRTE_MCA_prte_launch_agent", "prted")


def hydra(
    environ: Mapping[str, str], starter: RemoteLauncher, hosts: tuple[tuple[str, int], ...], again: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the command of MPICH's or Intel's hydra, which would pass every variable on (mpiexec.hydra(1))."""
    names = ("-genvlist", ",".join(forwarded_variables(environ)))
    where = ("-hosts", ",".join(f"{name}:{count}" for name, count in hosts))
    return (starter.path, "-n", str(sum(count for _, count in hosts)), *where, *names, *again)


def forwarded_variables(environ: Mapping[str, str]) -> list[str]:
    """Return the names of the variables that ranks on other nodes are given."""
    names = {name for name in environ if is_wanted(name) and not is_secret(name)}
    key = {JOB_KEY_VAR} & environ.keys()  # Open MPI warns of a variable that is not there
    return sorted(names | key | {"MASTER_ADDR", START_TIME_VAR, JOB_TOKEN_VAR, STATUS_VAR})


def withheld_variables(environ: Mapping[str, str]) -> list[str]:
    """Return the names of variables that ranks on other nodes would get if they did not look like secrets."""
    passed = (JOB_TOKEN_VAR, JOB_KEY_VAR)  # the entrypoint's own, which all ranks of a job need
    return sorted(name for name in environ if is_wanted(name) and is_secret(name) and name not in passed)


def is_wanted(name: str) -> bool:
    """Return whether ranks on other nodes use a variable of this name."""
    return name.startswith(FORWARDED_PREFIXES) or name in FORWARDED_NAMES
