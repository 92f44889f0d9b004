"""Which monitors rank 0 admits to a run: those of the same run, whose nodes agree with rank 0's, each rank once.

Also with which code a monitor exits, and the line that names the rank that failed first.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct, field

from entrypoint.core.errors import NOT_RETRYABLE, ExitCode, printable
from entrypoint.job.run_identity import PROGRAM


class FirstFailure(Struct, frozen=True):
    """The rank that failed first, its node, its exit code, and a description (`how`).

    `before_start`: the node has not started its ranks, and `how` is the whole reason. `lost_collective` is the
    collective in which the rank waited for others in vain, empty for another failure.
    """

    rank: int
    node: str
    code: int
    how: str
    before_start: bool = False
    lost_collective: str = ""


class RankEndpoint(Struct, frozen=True):
    """A rank, its node's name, rank 0's host, and the port on which rank 0's monitor listens.

    `token` distinguishes the run from other runs on that port; unless `is_unique`, another run may have the same.
    All nodes must have the same `world_size` and `version`. A world size of 0 means that the node starts no ranks.
    If a node's ranks share a connection to rank 0, its first one (`local_rank` 0) has it.
    """

    rank: int
    node: str
    host: str
    port: int
    token: str
    world_size: int = 0
    version: str = ""
    pid: int = 0
    is_unique: bool = True
    local_rank: int = 0
    shares_connection: bool = False

    @property
    def rank0_place(self) -> str:
        """Where rank 0 is looked for."""
        return f"rank 0 at {printable(self.host)}, port {self.port}"


class Admission(Struct):
    """The ranks that rank 0's monitor has admitted, and those that know how the run goes on (`arrived`)."""

    rank0: RankEndpoint
    admitted: dict[int, RankEndpoint] = field(default_factory=dict)
    arrived: set[int] = field(default_factory=set)

    def admit(self, other: RankEndpoint) -> tuple[str, FirstFailure | None]:
        """Return the answer to another run, and the failure where the nodes disagree."""
        if other.token != self.rank0.token:
            missing = other.rank != self.rank0.rank and other.rank not in self.admitted
            if missing and not self.rank0.is_unique and not other.is_unique:
                how = (
                    f"the nodes disagree: {self.rank0.node} runs `{command_of(self.rank0)}`, {other.node} runs"
                    f" `{command_of(other)}`. Start the same command on all nodes, or set another MASTER_PORT for each"
                    " run."
                )
                return "", FirstFailure(other.rank, other.node, int(ExitCode.USAGE), how, before_start=True)
            return self.rank0.token, None
        if not other.world_size or not self.rank0.world_size:
            return "", None
        holder = self.rank0 if other.rank == self.rank0.rank else self.admitted.get(other.rank)
        again = holder and (holder.node, holder.pid) == (other.node, other.pid)
        same_shape = (self.rank0.world_size, self.rank0.version) == (other.world_size, other.version)
        if holder and not again and not self.rank0.is_unique and same_shape:
            return f"{self.rank0.token} (it has its rank {other.rank})", None
        if failure := disagreement(self.rank0, other, None if again else holder):
            return "", failure
        self.admitted[other.rank] = other
        return "", None


def command_of(endpoint: RankEndpoint) -> str:
    """Return what a run by hand computes, as its identity has it."""
    return printable(endpoint.token.partition(PROGRAM)[2].rpartition(" (")[0] or endpoint.token)


def disagreement(rank0: RankEndpoint, other: RankEndpoint, holder: RankEndpoint | None) -> FirstFailure | None:
    """Return the failure of a run whose nodes disagree, None if they agree; `holder` already has the rank."""
    code, how = ExitCode.USAGE, ""
    if rank0.version != other.version:
        code = ExitCode.MACHINE
        how = (
            f"{rank0.node} runs version {rank0.version} of the entrypoint, {other.node} runs version {other.version}."
            " Use the same image on all nodes."
        )
    elif rank0.world_size != other.world_size:
        how = (
            f"the nodes disagree: {rank0.world_size} ranks by {rank0.node}, {other.world_size} by {other.node}."
            " Start them with the same LAUNCH_NNODES and LAUNCH_NPROC_PER_NODE."
        )
    elif holder:
        how = (
            f"rank {other.rank} is started twice, on {holder.node} and on {other.node}. Give each node its own"
            " LAUNCH_NODE_RANK, or each rank its own RANK."
        )
    return FirstFailure(other.rank, other.node, int(code), how, before_start=True) if how else None


def final_exit_code(code: int, received: Sequence[int], failure: FirstFailure | None, *, forced: bool) -> int:
    """Return the exit code of a monitor whose program ended with `code` (negative: a signal).

    `received` are the signals that the launcher sent, and `failure` is another rank's, which came first. With `forced`
    the monitor asked its program to end. Without a failure elsewhere the launcher's signal is the cause.
    """
    kept = with_signal_code(code, received)
    if failure and (forced or (kept - 128 in received and kept != failure.code)):
        return code_after(failure)  # a launcher too ends all ranks after the first failure
    return kept if kept >= 0 else ExitCode.RANK_FAILED


def with_signal_code(code: int, received: Sequence[int]) -> int:
    """Return 128 more than its number for a signal that the launcher sent, any other code as it is."""
    return 128 - code if code < 0 and -code in received else code


def failure_message(failure: FirstFailure) -> str:
    """Return the line that names the rank that failed first, or the node that could not start."""
    if failure.before_start:
        return f"{failure.node}: {failure.how}"
    return f"rank {failure.rank} on {failure.node} failed first: {failure.how}"


def code_after(failure: FirstFailure) -> ExitCode:
    """Return the exit code of the ranks that end because another one failed."""
    kept = failure.before_start or failure.code in NOT_RETRYABLE
    return ExitCode(failure.code) if kept else ExitCode.RANK_FAILED
