"""Any other program in an image: `docker run IMAGE bash`."""

from __future__ import annotations

from entrypoint.cli.invocation import Invocation
from entrypoint.core.process import replace_process
from entrypoint.core.user_dirs import with_fallbacks


def run(invocation: Invocation) -> int:
    """Become the program."""
    program = invocation.command.program
    assert program is not None
    replace_process(program.argv, with_fallbacks(invocation.environ))
