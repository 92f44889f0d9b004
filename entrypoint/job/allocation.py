"""Read the hosts that PBS, LSF or Grid Engine gave to a batch job; Slurm's are in `slurm`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from entrypoint.core.errors import UserError, printable
from entrypoint.core.files import read_regular
from entrypoint.job.detect import Job

# The hosts with their CPUs, for ranks on other hosts: mpirun's ssh does not pass the scheduler's variables on.
ALLOCATION_VAR = "ENTRYPOINT_ALLOCATION"
HOST_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}"


class Allocation(Struct, frozen=True):
    """The hosts of a batch job in order, each with the CPUs that it grants there (0: not said).

    `unreadable` names what says that there may be hosts which cannot be read here.
    """

    scheduler: str = ""
    hosts: tuple[tuple[str, int], ...] = ()
    unreadable: str = ""

    def to_variable(self) -> str:
        """Return the value of ENTRYPOINT_ALLOCATION, empty where no CPUs are known."""
        listed = ",".join(f"{name}:{cpus}" for name, cpus in self.hosts if cpus)
        return f"{self.scheduler}={listed}" if listed else ""


def read_allocation(environ: Mapping[str, str]) -> Allocation:
    """Return the hosts of this batch job, none outside one; raises `UserError` for a list that cannot be understood.

    A job of Slurm has its own variables. Slots are CPUs in LSF (LSB_MCPU_HOSTS), in Grid Engine (sge_pe(5)) and in
    Torque (`ppn`). A line of OpenPBS's file is an MPI process (`mpiprocs`), which says nothing of CPUs.
    """
    if environ.get("SLURM_JOB_ID"):
        return Allocation()
    if environ.get("LSB_JOBID") and environ.get("LSB_MCPU_HOSTS"):
        return Allocation("LSF", parse_pairs("LSB_MCPU_HOSTS", environ["LSB_MCPU_HOSTS"].split()))
    if environ.get("PE_HOSTFILE"):
        return read_host_file("Grid Engine", "PE_HOSTFILE", environ)
    if environ.get("PBS_JOBID") and environ.get("PBS_NODEFILE"):
        return read_host_file("PBS", "PBS_NODEFILE", environ)
    if environ.get("FLUX_ENCLOSING_ID"):  # a batch script of Flux has no other variable; `flux run` sets them
        return Allocation("Flux", unreadable=f"FLUX_ENCLOSING_ID={printable(environ['FLUX_ENCLOSING_ID'])}")
    scheduler, _, listed = environ.get(ALLOCATION_VAR, "").partition("=")
    return Allocation(scheduler, parse_pairs(ALLOCATION_VAR, re.split("[:,]", listed))) if listed else Allocation()


def read_host_file(scheduler: str, variable: str, environ: Mapping[str, str]) -> Allocation:
    """Return the hosts of the file that a variable names; a container may hide that file."""
    path = environ[variable]
    try:
        lines = [line.split() for line in read_regular(path).splitlines() if line.strip()]
    except OSError as error:
        return Allocation(scheduler, unreadable=f"{variable}={printable(path)} ({error.strerror})")
    if variable == "PE_HOSTFILE":
        pairs = parse_pairs(f"{variable}={path}", [word for line in lines for word in [*line, "?"][:2]])
        return Allocation(scheduler, pairs)
    slots = Counter(line[0] for line in lines)
    of_torque = bool(environ.get("PBS_NUM_PPN"))
    named = [word for name, count in slots.items() for word in (name, str(count if of_torque else 0))]
    return Allocation(scheduler, parse_pairs(f"{variable}={path}", named))


def parse_pairs(source: str, words: list[str]) -> tuple[tuple[str, int], ...]:
    """Return the hosts of `node1 8 node2 4`; a host that is named twice has the sum. Raises `UserError`."""
    totals: dict[str, int] = {}
    for name, slots in zip(words[::2], [*words[1::2], "?"][: len(words[::2])], strict=True):
        if not re.fullmatch(HOST_NAME, name) or not re.fullmatch(r"\d{1,6}", slots, re.ASCII):
            raise UserError(
                f"{printable(source)}: {printable(name)} {printable(slots)} is no host with its slots. The scheduler"
                " sets it, so unset it if you did."
            )
        totals[name] = totals.get(name, 0) + int(slots)
    return tuple(totals.items())


def with_allocation(job: Job, allocation: Allocation, hostname: str) -> Job:
    """Return the job with the hosts of its scheduler, and the CPUs that it grants on this host."""
    if not allocation.scheduler:
        return job
    own = hostname.partition(".")[0]
    cpus = next((cpus for name, cpus in allocation.hosts if name.partition(".")[0] == own), 0) or None
    names = tuple(name for name, _ in allocation.hosts)
    if job.launcher:
        # The first host of an LSF job may be one that has no ranks, on which the batch script runs.
        known = job.master_addr or (names[0] if names and allocation.scheduler != "LSF" else "")
        return replace(job, scheduler=allocation.scheduler, granted_cpus=cpus, master_addr=known)
    return replace(
        job,
        scheduler=allocation.scheduler,
        granted_cpus=cpus,
        node_cpus=cpus,
        hostnames=names,
        master_addr=job.master_addr or (names[0] if names else ""),
        hidden_hosts=allocation.unreadable,
    )
