"""A node in a file, which `doctor --export-machine` writes on a compute node and `plan --machine` reads elsewhere."""

from __future__ import annotations

from pathlib import Path

import msgspec

from entrypoint.core.errors import UserError, printable
from entrypoint.core.paths import read_regular
from entrypoint.machine.detect import Machine


def export_machine(machine: Machine) -> str:
    """Return the text of the file, without the load of these seconds."""
    idle = msgspec.structs.replace(machine, busy_cpus=0.0)
    return msgspec.json.format(msgspec.json.encode(idle)).decode() + "\n"


def read_machine(path: Path) -> Machine:
    """Return the node that the file describes; raises `UserError` if it describes none."""
    try:
        text = read_regular(path)
        machine: Machine = msgspec.json.decode(text, type=Machine)
        if not machine.cpus or len({cpu.id for cpu in machine.cpus}) < len(machine.cpus) or machine.memory_bytes < 1:
            raise ValueError("a node has CPUs with different ids, and memory")
        if "\\" in text or not all(map(str.isprintable, text.split("\n"))):
            raise ValueError("a name has control characters")
    except OSError as error:
        raise UserError(
            f"--machine={printable(path)}: {error.strerror}. Name a file of `doctor --export-machine`."
        ) from None
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"--machine={printable(path)}: does not describe a node ({printable(error)}). Write it there by"
            " `entrypoint doctor --export-machine > node.json`."
        ) from None
    return machine
