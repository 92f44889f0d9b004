"""`entrypoint train` and `entrypoint run`: make the plan and launch what it says; `entrypoint plan` only shows it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import TextIO

from entrypoint.cli.build_plan import build_plan, settings_affecting_speed
from entrypoint.cli.parser import Invocation, plan_as_typed
from entrypoint.cli.plan_inputs import read_plan_inputs, telling_other_nodes
from entrypoint.core.console import log, write_stderr, write_stdout
from entrypoint.core.errors import ExitCode
from entrypoint.launch.dispatch import REMOTE_LAUNCHERS, launch
from entrypoint.plan.display import DEFAULT_COLUMNS, Layout, plan_lines
from entrypoint.plan.inputs import PlanInputs
from entrypoint.plan.model import Plan
from entrypoint.tune.store import annotate, apply_tuning, load

# Terminals of other widths have lines of these.
MIN_COLUMNS, MAX_COLUMNS = 60, 140


def run(invocation: Invocation) -> int:
    """Make the plan, then launch it, or print it where that is asked for."""
    command, inputs = invocation.command, read_plan_inputs(invocation, counts_load=True)
    plan = tuned_plan(invocation, inputs)
    if not command.launches:
        layout = layout_of(sys.stdout, os.environ, verbose="verbose" in command.switches)
        write_stdout(plan.to_json(indent=2) if command.json else "\n".join(plan_lines(plan, layout, command=True)))
        return ExitCode.DONE
    if inputs.job.rank == 0 and plan.prominent_warning:
        log(f"warning: {plan.prominent_warning}")
    if inputs.job.rank == 0 and not inputs.settings.values.quiet:
        only = "launcher" if plan.launcher in REMOTE_LAUNCHERS else ""  # each rank's node shows the rest
        layout = layout_of(sys.stderr, inputs.environ, verbose="verbose" in command.switches)
        write_stderr("\n".join(plan_lines(plan, layout, only=only)))
    if plan.program.kind == "notebook" and plan.launcher not in REMOTE_LAUNCHERS:  # there each rank has it run
        from entrypoint.launch.notebook import with_notebook_runner

        plan = with_notebook_runner(plan)
    launch(plan, inputs.job, inputs.environ, invocation.began_s)


def tuned_plan(invocation: Invocation, inputs: PlanInputs) -> Plan:
    """Return the plan with settings as typed, and with what `entrypoint tune` has found for this program here."""
    command = invocation.command
    with telling_other_nodes(command, inputs.job, inputs.environ):
        tuned = load(inputs, lambda: settings_affecting_speed(command, inputs))
        applied = apply_tuning(inputs, tuned, command.flags) if tuned and not tuned.not_used else inputs
        plan = build_plan(command, applied)
        return plan_as_typed(annotate(plan, tuned) if tuned else plan, invocation.typed)


def layout_of(stream: TextIO, environ: Mapping[str, str], *, verbose: bool = False) -> Layout:
    """Return the layout of a terminal; what is no terminal has a width of its own, and no color unless it is forced.

    COLUMNS, NO_COLOR (no-color.org) and CLICOLOR_FORCE (bixense.com/clicolors) are the user's.
    """
    is_terminal, columns = stream.isatty(), DEFAULT_COLUMNS
    if is_terminal:
        asked = environ.get("COLUMNS", "")
        with suppress(OSError):  # it has no size
            columns = int(asked) if asked.isdecimal() else os.get_terminal_size(stream.fileno()).columns
        columns = min(MAX_COLUMNS, max(MIN_COLUMNS, columns or DEFAULT_COLUMNS))
    is_forced = environ.get("CLICOLOR_FORCE", "0") not in ("", "0")
    can_color = is_terminal and environ.get("TERM", "dumb") != "dumb"
    return Layout(columns, not environ.get("NO_COLOR") and (is_forced or can_color), verbose)
