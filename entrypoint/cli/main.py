"""From the words of the command line to the exit code."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

from entrypoint.cli.command_table import COMMANDS, all_groups
from entrypoint.cli.parser import Invocation, as_typed, parse_command_line, typed_flags
from entrypoint.core.console import RECORD_VAR, STATUS_VAR, report_error, write_stdout
from entrypoint.core.errors import ExitCode, UserError, first_line, printable
from entrypoint.core.exit_delay import PROGRAM_VAR
from entrypoint.core.process import PREEMPTION, replace_process
from entrypoint.core.user_dirs import with_fallbacks
from entrypoint.job.node_group import START_TIME_VAR
from entrypoint.machine.container import read_image
from entrypoint.machine.cpu_load import take_sample
from entrypoint.plan.model import PLAN_VAR

# What a rank has from its launcher. A command that the rank's program starts is none of that job.
OF_THE_RANK = (PLAN_VAR, START_TIME_VAR, RECORD_VAR, STATUS_VAR, PROGRAM_VAR, "TORCHELASTIC_ERROR_FILE")


def main() -> int:
    """Run the command line and return the exit code; an error is one line on standard error."""
    if PLAN_VAR in os.environ:
        for name in OF_THE_RANK:
            os.environ.pop(name, None)
    if sys.argv[1:2] == ["train"]:  # a scheduler's warning must not end a job that has no rank yet
        signal.pthread_sigmask(signal.SIG_BLOCK, PREEMPTION)
    try:
        return run_command(sys.argv[1:], dict(os.environ))
    except UserError as error:
        return report_error(error)
    except BrokenPipeError:  # `entrypoint plan | head`
        return ExitCode.DONE
    except OSError as error:  # whatever else a machine refuses: a full disk, no more processes or descriptors
        where = f"{printable(error.filename)}: " if error.filename else ""
        line = f"{where}{error.strerror or first_line(error)}. `entrypoint doctor` checks this machine."
        return report_error(UserError(line, ExitCode.MACHINE))
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED


def run_command(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a command; `environ` is what the program will get."""
    began_s, load = time.time(), take_sample()
    command = parse_command_line(argv, in_image=bool(read_image(Path("/"))))
    if command.command == "help":
        write_stdout(command.help_text)
        return ExitCode.DONE
    if command.command == "other" and command.program:  # in an image alone: `docker run IMAGE bash`
        replace_process(command.program.argv, with_fallbacks(environ))
    typed = typed_flags(command)
    if command.config:
        from entrypoint.cli.config_file import with_config

        environ = with_config(environ, command.config, all_groups())
    module = import_module(f"entrypoint.cli.commands.{COMMANDS[command.command].module}")
    try:
        return int(module.run(Invocation(command=command, environ=environ, typed=typed, began_s=began_s, load=load)))
    except UserError as error:
        error.args = (as_typed(str(error), typed),)
        raise
