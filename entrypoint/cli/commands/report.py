"""`entrypoint report`, `compare` and `runs`: start the program that shows runs."""

from __future__ import annotations

from pathlib import Path

from entrypoint.cli.parser import Invocation
from entrypoint.core.errors import printable, refuse_if
from entrypoint.core.packages import require_extra
from entrypoint.core.process import module_command, replace_process
from entrypoint.core.user_dirs import with_fallbacks


def run(invocation: Invocation) -> int:
    """Show the runs that the words name."""
    command = invocation.command
    usage = {"report": ("RUN",), "compare": ("RUN", "RUN")}.get(command.command, ())
    # `compare runs/*` names the page that it wrote the last time.
    words = [word for word in command.words if command.command != "compare" or Path(word).name != "compare.html"]
    refuse_if(
        {
            f"{command.command}: needs finished runs. Use `entrypoint {command.command} {' '.join(usage)}`.": (
                len(words) < len(usage)
            ),
            f"runs {printable(''.join(words[1:2]))}: one folder at a time. Leave the others out.": (
                command.command == "runs" and len(words) > 1
            ),
        }
    )
    require_extra("train", command.command)
    from train.checkpoint.store import local_run

    named = [local_run(word, invocation.environ, tensors=False) for word in words]
    replace_process(module_command("train.report.show", command.command, *named), with_fallbacks(invocation.environ))
