"""Derive the ports of a job from its id."""

from __future__ import annotations

import zlib

from entrypoint.core.errors import UserError, printable

# Identifies the job if the launcher does not. An mpirun that the entrypoint starts forwards it.
JOB_TOKEN_VAR = "ENTRYPOINT_JOB"
# Start time of the whole command (Unix time, s). The trainer's total_seconds counts from it. A launcher that the
# entrypoint starts forwards it to the ranks.
START_TIME_VAR = "ENTRYPOINT_STARTED"
# Above Linux's ephemeral range (32768 to 60999): ports for ranks, then as many for failure channels.
FIRST_PORT, PORT_COUNT = 61000, 2200


def port_from_job_id(job_id: str) -> int:
    """Return the port that every node derives from the job's id."""
    return FIRST_PORT + (int(job_id) if job_id.isdecimal() else zlib.crc32(job_id.encode())) % PORT_COUNT


def monitor_port(port: int) -> int:
    """Return the port of the failure channel of ranks that meet on this port."""
    return FIRST_PORT + PORT_COUNT + port % PORT_COUNT


def parse_port(text: str, source: str = "") -> int:
    """Return the rendezvous port that the user or platform sets; raises `UserError` if it is invalid.

    `source` is how it is set, by default MASTER_PORT.
    """
    if not text.isascii() or not text.isdecimal() or not 0 < int(text) < 65536:
        source = source or f"MASTER_PORT={text}"
        raise UserError(f"{printable(source)}: not a port; expected a number from 1 to 65535")
    return int(text)
