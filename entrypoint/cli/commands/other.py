"""Any other program in an image: `docker run IMAGE bash`."""

from __future__ import annotations

from collections.abc import Mapping

from entrypoint.cli.parser import CommandLine
from entrypoint.cli.start import ProcessStart
from entrypoint.core.process import replace_process
from entrypoint.core.user_dirs import with_fallbacks


def run(command: CommandLine, environ: Mapping[str, str], _: ProcessStart) -> int:
    """Become the program."""
    assert command.program is not None
    replace_process(command.program.argv, with_fallbacks(environ))
