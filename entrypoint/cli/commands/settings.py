"""`entrypoint settings`: print the list of settings."""

from __future__ import annotations

from entrypoint.cli.command_table import all_groups
from entrypoint.cli.help import help_all
from entrypoint.cli.parser import Invocation
from entrypoint.core.console import write_stdout
from entrypoint.core.errors import ExitCode


def run(_: Invocation) -> int:
    """Print all settings."""
    write_stdout(help_all(all_groups().values()))
    return ExitCode.DONE
