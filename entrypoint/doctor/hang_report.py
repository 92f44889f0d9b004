"""Prints which ranks of this node are missing from a collective: `hang_report PROCESS CALLED PLACE`.

A rank that mpirun or srun started on one node has no parent of ours that could do it. It starts this program at its
end. One of several that do so at once prints, and the others wait for it.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping

from entrypoint.core.console import log, write_stderr
from entrypoint.core.errors import HANG_SETTLE_S, UserError
from entrypoint.core.process import fast_exit
from entrypoint.doctor.running_ranks import find_ranks, rank_number
from entrypoint.machine.missing_ranks import UNTIL_LIMIT, find_missing, missing_line, missing_stacks
from entrypoint.supervise.monitor import PROCESS_NAME as MONITOR

# What the ranks of one job have in common.
SAME_JOB = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")
WAIT_LIMIT_S = 10.0
POLL_INTERVAL_S = 0.1
# The kernel gives a name without a file to one process at a time.
NAMED = socket.socket(socket.AF_UNIX)


def main(process: str, called: str, place: str) -> int:
    """Print the line and the stacks, or wait until another process has; `process` is the rank that waited."""
    try:
        ranks = find_ranks((), "hang_report")
    except UserError:  # /proc shows no process, as with hidepid
        return 0
    own = ranks.get(process)
    if own is None:
        return 0
    name = f"\0entrypoint-hang-{os.getuid()}-{own.get('MASTER_PORT')}-{own.get('WORLD_SIZE')}"
    until = time.monotonic() + WAIT_LIMIT_S
    if has_name(name):
        time.sleep(HANG_SETTLE_S)
        report(ranks, process, {"called": called, "place": place})
        return 0
    while not has_name(name) and time.monotonic() < until:
        time.sleep(POLL_INTERVAL_S)
    return 0


def has_name(name: str) -> bool:
    """Take a name for as long as this process lives; return False if another process has it."""
    try:
        NAMED.bind(name)
    except OSError:
        return False
    return True


def report(ranks: Mapping[str, Mapping[str, str]], process: str, lost: Mapping[str, str]) -> None:
    """Print where the ranks are that are missing from a collective, if they are on this node."""
    own = ranks[process]
    job = [(other, environ) for other, environ in ranks.items() if all(environ.get(n) == own.get(n) for n in SAME_JOB)]
    others = {rank_number(environ): int(other) for other, environ in job if other != process}
    missing = find_missing(others, lost["place"], MONITOR)
    if missing:
        log(missing_line(missing, lost, rank_number(own), UNTIL_LIMIT))
        for text in missing_stacks(missing):
            write_stderr(text)


if __name__ == "__main__":
    fast_exit(main(*sys.argv[1:]))
