"""Derive the ports of a job from its id."""

from __future__ import annotations

import zlib

from entrypoint.core.errors import UserError, printable

# Identifies the job if the launcher does not. An mpirun that the entrypoint starts forwards it.
JOB_TOKEN_VAR = "ENTRYPOINT_JOB"
# Start time of the whole command (Unix time, s). The trainer's total_seconds counts from it. A launcher that the
# entrypoint starts forwards it to the ranks.
START_TIME_VAR = "ENTRYPOINT_STARTED"


PORT_ATTEMPTS = 8


def port_from_job_id(job_id: str) -> int:
    """Return the port that every node derives from the job's id, above Linux's ephemeral range (32768 to 60999)."""
    return 61000 + (int(job_id) if job_id.isdecimal() else zlib.crc32(job_id.encode())) % 4000


def fallback_ports(port: int) -> tuple[int, ...]:
    """Return the candidate rendezvous ports: the port of `port_from_job_id`, then the alternatives."""
    return tuple(61000 + (port - 61000 + step) % 4000 for step in range(PORT_ATTEMPTS))


def monitor_ports(port: int) -> tuple[int, ...]:
    """Return the candidate ports of the failure channel, above the ranks' own.

    Each belongs to the candidate of `fallback_ports` at the same place. A monitor that listens on it is the only one
    that may take that rendezvous port.
    """
    return tuple(65000 + candidate % 536 for candidate in fallback_ports(port))


def parse_port(text: str, source: str = "") -> int:
    """Return the rendezvous port that the user or platform sets; raises `UserError` if it is invalid.

    `source` is how it is set, by default MASTER_PORT.
    """
    if not text.isascii() or not text.isdecimal() or not 0 < int(text) < 65536:
        source = source or f"MASTER_PORT={text}"
        raise UserError(f"{printable(source)}: not a port; expected a number from 1 to 65535")
    return int(text)
