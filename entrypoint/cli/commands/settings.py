"""`entrypoint settings`: print the list of settings, or their schema."""

from __future__ import annotations

from collections.abc import Mapping

from entrypoint.cli.command_table import all_groups
from entrypoint.cli.help import help_all
from entrypoint.cli.parser import CommandLine
from entrypoint.cli.settings_schema import schema_text
from entrypoint.cli.start import ProcessStart
from entrypoint.core.console import write_stdout
from entrypoint.core.errors import ExitCode


def run(command: CommandLine, _: Mapping[str, str], __: ProcessStart) -> int:
    """Print all settings."""
    groups = all_groups()
    write_stdout(schema_text(groups) if "json-schema" in command.switches else help_all(groups.values()))
    return ExitCode.DONE
