"""`entrypoint settings`: print the list of settings, or their schema."""

from __future__ import annotations

from entrypoint.cli.command_table import all_groups
from entrypoint.cli.help import help_all
from entrypoint.cli.invocation import Invocation
from entrypoint.cli.settings_schema import schema_text
from entrypoint.core.console import write_stdout
from entrypoint.core.errors import ExitCode


def run(invocation: Invocation) -> int:
    """Print all settings."""
    groups = all_groups()
    write_stdout(schema_text(groups) if "json-schema" in invocation.command.switches else help_all(groups.values()))
    return ExitCode.DONE
