"""Restarts of failed ranks, the command of torchrun's agent on each node, and where the output of ranks goes.

Agents that share a rendezvous can restart all ranks when one fails or a node is lost. Other agents share none, because
they would lose what they share.
"""

from __future__ import annotations

import zlib

from entrypoint.core.errors import NOT_RETRYABLE, UserError, printable, refuse_if
from entrypoint.core.process import module_command, own_command
from entrypoint.job.slurm import number
from entrypoint.machine.cpu_topology import parse_cpu_list
from entrypoint.plan.inputs import PlanInputs
from entrypoint.plan.model import Decision, LauncherKind, OutputPlan, Plan, Source
from entrypoint.plan.remote_ranks import world_size_for

AUTO_RESTARTS = 3
# Seconds that agents wait for more nodes when enough have joined, and after which a silent agent is lost.
# torch's defaults resume much later after a loss (torch/distributed/elastic/rendezvous/dynamic_rendezvous.py).
ELASTIC_RENDEZVOUS_CONF = "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=5,read_timeout=20"


def decide_restarts(inputs: PlanInputs) -> tuple[int, tuple[Decision, ...]]:
    """Return how often failed ranks restart; raises `UserError` where nothing here can restart them."""
    values, group = inputs.settings.values, inputs.node_group
    elastic = group.min_nodes is not None
    requested = values.max_restarts
    of_pods = number(inputs.environ, "PET_MAX_RESTARTS", AUTO_RESTARTS) if elastic else 0
    count = of_pods if requested == "auto" else requested
    if not count:
        return 0, ()
    setting_source = inputs.settings.sources.get("max_restarts", group.source)
    mpi = inputs.remote_launcher.path if inputs.remote_launcher and inputs.remote_launcher.mpi else ""
    refuse_if(
        {
            f"{setting_source}: {inputs.job.launcher} started the ranks and cannot restart them. Start one process per"
            " node with LAUNCH_LAUNCHER=torchrun.": inputs.job.launcher,
            f"{setting_source}: {mpi} cannot restart ranks. Drop one of the two.": mpi,
            f"{setting_source} and {inputs.settings.sources.get('launcher')} contradict: only torchrun's agent restarts"
            " ranks of several nodes, and a single rank is started once. Drop one of the two.": (
                values.launcher == "direct" or (values.launcher == "local" and group.nnodes > 1)
            ),
        }
    )
    scope = f"all ranks restart{f', on {group.min_nodes} to {group.nnodes} nodes' if elastic else ''}"
    scope += f"; not after the codes {', '.join(str(int(code)) for code in NOT_RETRYABLE)}"
    return count, (inputs.decide("max_restarts", "restarts", str(count), "the job is elastic", scope),)


def agent_command(plan: Plan, inputs: PlanInputs) -> tuple[str, ...]:
    """Return the command of this node's agent, which starts `entrypoint rank` in each rank.

    Agents meet in a store that the agent of node 0 serves, which must run there; each agent finds it by a port of its
    own (`launch.agent_store`).
    """
    nodes, rendezvous = plan.nodes, plan.rendezvous
    if plan.uses_elastic_rendezvous:
        count = f"{nodes.min_nodes}:{nodes.nnodes}"
        address: tuple[str, ...] = ()
        conf = f"is_host=0,join_timeout={rendezvous.timeout_s},{ELASTIC_RENDEZVOUS_CONF}"
    else:
        count, address, conf = "1", ("--local-addr=127.0.0.1",), "is_host=0"
    options = (
        f"--nnodes={count}",
        f"--nproc-per-node={nodes.nproc_per_node}",
        "--rdzv-backend=c10d",
        f"--rdzv-id={inputs.job.job_id or zlib.crc32(inputs.run_identity.encode())}",
        f"--rdzv-conf={conf}",
        *address,
        *output_options(plan),
        f"--max-restarts={nodes.max_restarts}",
        "--no-python",
        *own_command("rank", python=inputs.python),
    )
    return module_command("entrypoint.launch.torchrun", *options, python=inputs.python)


def output_options(plan: Plan) -> tuple[str, ...]:
    """Return torchrun's options for the output of this node's ranks (its manual); it marks all lines that it shows."""
    output, nodes = plan.output, plan.nodes
    if output == OutputPlan():
        return ()
    first = nodes.node_rank * nodes.nproc_per_node
    shown = [str(rank - first) for rank in output.shown_ranks if 0 <= rank - first < nodes.nproc_per_node]
    options = ["--tee=3" if shown or not output.shown_ranks else "--redirects=3"]
    if shown:
        options.append(f"--local-ranks-filter={','.join(shown)}")
    if output.log_dir:
        options.append(f"--log-dir={output.log_dir}")
    return tuple(options)


# What does the same where another launcher starts the ranks (their manuals).
OTHER_LAUNCHERS = {
    "srun": "srun --label --output=rank-%t.log",
    "Open MPI": "mpirun --tag-output --output-filename DIR",
    "mpirun": "mpirun's own options",
    "torchrun": "torchrun --log-dir=DIR --tee=3",
}
FIELDS = ("log_dir", "log_ranks", "log_prefix")


def decide_output(
    inputs: PlanInputs, launcher: LauncherKind, nproc: int
) -> tuple[OutputPlan, tuple[Decision, ...], tuple[str, ...]]:
    """Return what becomes of the output of ranks that the entrypoint starts, with its decisions and warnings.

    Another launcher relays its ranks' output itself; settings are then named as without effect. Raises `UserError` for
    ranks that do not exist, or whose output would be shown nowhere.
    """
    values, sources = inputs.settings.values, inputs.settings.sources
    given = [printable(sources[name]) for name in FIELDS if getattr(values, name)]
    if not given:
        return OutputPlan(), (), ()
    if launcher in (LauncherKind.RANK, LauncherKind.MPIRUN, LauncherKind.SRUN):
        name = inputs.job.launcher or str(launcher)
        hint = OTHER_LAUNCHERS.get(name, "its own options")
        return OutputPlan(), (), (f"{', '.join(given)}: no effect, {name} relays the ranks' output. Use {hint}.",)
    if values.log_ranks and not values.log_dir:
        raise UserError(
            f"{printable(sources['log_ranks'])}: the output of the other ranks would be lost. Set LAUNCH_LOG_DIR too."
        )
    ranks, world_size = parse_cpu_list(values.log_ranks), world_size_for(inputs, nproc)
    if values.log_ranks and max(ranks, default=world_size) >= world_size:
        source = printable(sources["log_ranks"])
        raise UserError(f"{source}: the job has ranks 0 to {world_size - 1}. Name some of these.")
    shown = f"shows rank {values.log_ranks}" if ranks else "shows all ranks"
    kept = f", keeps files in {printable(values.log_dir)}" if values.log_dir else ""
    decision = Decision(
        key="output", value="relayed", reason=f"{shown}{kept}", source=Source.USER, setting=", ".join(given)
    )
    return (
        OutputPlan(log_dir=values.log_dir, shown_ranks=tuple(sorted(set(ranks))), prefix=values.log_prefix),
        (decision,),
        (),
    )
