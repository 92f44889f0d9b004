"""`entrypoint report`, `compare` and `runs`: start the program that shows runs."""

from __future__ import annotations

from entrypoint.cli.parser import Invocation
from entrypoint.core.errors import UserError
from entrypoint.core.packages import require_extra
from entrypoint.core.process import module_command, replace_process
from entrypoint.core.user_dirs import with_fallbacks


def run(invocation: Invocation) -> int:
    """Show the runs that the words name."""
    command = invocation.command
    usage = {"report": ("RUN",), "compare": ("RUN", "RUN")}.get(command.command, ())
    if len(command.words) < len(usage):
        raise UserError(
            f"{command.command}: needs finished runs. Use `entrypoint {command.command} {' '.join(usage)}`."
        )
    require_extra("train", command.command)
    from train.checkpoint.store import local_run

    named = [local_run(word, invocation.environ, tensors=False) for word in command.words]
    words = module_command("train.report.show", command.command, *named)
    replace_process(words, with_fallbacks(invocation.environ))
