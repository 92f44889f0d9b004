"""How many ranks a job has, and how many of them mpirun or srun starts on which nodes."""

from __future__ import annotations

from entrypoint.core.network import is_loopback_name
from entrypoint.job.slurm import expand_per_node_count, number
from entrypoint.plan.inputs import PlanInputs


def world_size_for(inputs: PlanInputs, nproc: int) -> int:
    """Return the world size, where this node starts `nproc` ranks unless a launcher starts all."""
    if inputs.job.launcher:
        return inputs.job.world_size
    if inputs.remote_launcher is None:
        return nproc * inputs.node_group.nnodes
    if inputs.remote_launcher.mpi:
        return sum(count for _, count in ranks_per_host(inputs, nproc))
    return number(inputs.environ, "SLURM_NTASKS", 0) if uses_slurm_ntasks(inputs) else node_count(inputs) * nproc


def ranks_per_host(inputs: PlanInputs, nproc: int) -> tuple[tuple[str, int], ...]:
    """Return the nodes with ranks on each: the user's list, else the scheduler's, else this one with `nproc`."""
    launcher = inputs.remote_launcher
    if launcher and launcher.hosts:
        return tuple((name, count or nproc) for name, count in launcher.hosts)
    nodes, tasks = inputs.job.hostnames, inputs.environ.get("SLURM_TASKS_PER_NODE", "")
    if tasks and uses_slurm_ntasks(inputs):
        return tuple(
            (name, expand_per_node_count("SLURM_TASKS_PER_NODE", tasks, index)) for index, name in enumerate(nodes)
        )
    return tuple((name, nproc) for name in nodes) or (("localhost", nproc),)


def node_count(inputs: PlanInputs) -> int:
    """Return the number of nodes on which mpirun or srun starts ranks."""
    listed = inputs.remote_launcher.hosts if inputs.remote_launcher else ()
    return max(1, len(listed or inputs.job.hostnames))


def ranks_on_first_host(inputs: PlanInputs) -> int | None:
    """Return the number of ranks on the first node, None if this node's plan decides it."""
    launcher = inputs.remote_launcher
    if launcher is None:
        return None
    if launcher.hosts:
        return launcher.hosts[0][1] or None
    if not uses_slurm_ntasks(inputs):
        return None
    tasks = inputs.environ.get("SLURM_TASKS_PER_NODE", "")
    total = number(inputs.environ, "SLURM_NTASKS", 0)
    return expand_per_node_count("SLURM_TASKS_PER_NODE", tasks, 0) if tasks else -(-total // node_count(inputs))


def uses_slurm_ntasks(inputs: PlanInputs) -> bool:
    """Return whether the batch job says how many tasks it has, and the user does not say otherwise."""
    tasks = number(inputs.environ, "SLURM_NTASKS", 0)
    free = not inputs.is_set_by_user("nproc_per_node") and not inputs.machine.gpus
    return free and tasks >= max(1, len(inputs.job.hostnames))


def starts_ranks_here(inputs: PlanInputs) -> bool:
    """Return whether this node is one of those with ranks, so that its own cores and GPUs limit them."""
    listed = inputs.remote_launcher.hosts if inputs.remote_launcher else ()
    own = inputs.machine.hostname.partition(".")[0]
    return not listed or any(is_loopback_name(name) or name.partition(".")[0] == own for name, _ in listed)
