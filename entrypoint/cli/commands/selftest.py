"""`entrypoint selftest`: the tests that are useful where the program is installed."""

from __future__ import annotations

from collections.abc import Mapping

from entrypoint.cli.parser import CommandLine
from entrypoint.cli.start import ProcessStart
from entrypoint.core.process import replace_process
from entrypoint.core.user_dirs import with_fallbacks
from entrypoint.doctor.selftest import selftest_command


def run(_: CommandLine, environ: Mapping[str, str], __: ProcessStart) -> int:
    """Run the tests."""
    replace_process(selftest_command(), with_fallbacks(environ))
