"""One call of the command line: what was asked for, with which environment, and when it began."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from entrypoint.cli.parser import CommandLine
from entrypoint.machine.cpu_load import LoadSample


class Invocation(Struct, frozen=True, kw_only=True):
    """A command with its environment; `began_s` and `load` are the wall-clock time and all CPU time at its start.

    `typed` has what the user typed for settings (see `as_typed`).
    """

    command: CommandLine
    environ: Mapping[str, str]
    typed: Mapping[str, str] = field(default_factory=dict)
    began_s: float
    load: LoadSample
