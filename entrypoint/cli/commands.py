"""One function per command, from the command line to the exit code."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from entrypoint.core.console import report_error
from entrypoint.core.errors import ExitCode, UserError
from entrypoint.core.process import gc_paused
from entrypoint.job.detect import detect_job

with gc_paused():
    from entrypoint.cli import build_plan as plans
    from entrypoint.cli.parser import CommandLine, parse_command_line
    from entrypoint.core.process import replace_process
    from entrypoint.core.settings_base import Settings, read_settings, variable_name
    from entrypoint.core.user_dirs import apply_fallbacks
    from entrypoint.doctor.selftest import selftest_command
    from entrypoint.job.launcher_quirks import drop_torchrun_thread_default
    from entrypoint.launch.dispatch import REMOTE_LAUNCHERS, launch
    from entrypoint.machine import cpu_load
    from entrypoint.machine.container import read_image
    from entrypoint.plan.display import plan_lines
    from entrypoint.plan.inputs import PlanInputs
    from entrypoint.settings import read_launch_settings
    from entrypoint.tune.store import annotate


def main() -> int:
    """Run the command line and return the exit code; an error is one line on standard error."""
    try:
        code = run_command(sys.argv[1:], dict(os.environ))
        sys.stdout.flush()  # a closed pipe is no error yet here
        return code
    except UserError as error:
        return report_error(error)
    except BrokenPipeError:  # `entrypoint plan | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return ExitCode.DONE
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED


def run_command(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a command; `environ` is what the program will get."""
    started, load = time.time(), cpu_load.take_sample()
    command = parse_command_line(argv, setting_groups(argv), in_image=bool(read_image(Path("/"))))
    if command.command == "help":
        print(command.help_text)
        return ExitCode.DONE
    if command.command == "verify":
        return verify_command(command)
    fallbacks = apply_fallbacks(environ, make=command.launches)
    environ = {**environ, **{name: value for name, (value, _) in fallbacks.items()}}
    if command.command in ("other", "selftest"):
        replace_process(command.program.argv if command.program else selftest_command(), environ)
    settings, job = read_launch_settings(environ, command.launch_flags), detect_job(environ)
    question = plans.detect_plan_inputs(command, settings, job, drop_torchrun_thread_default(environ, job))
    question = replace(question, dir_fallbacks=fallbacks)
    if command.command == "tune":  # its trials use the plan as it is, whatever other processes do
        return tune_command(command, question)
    question = replace(question, machine=replace(question.machine, busy_cpus_measured=cpu_load.other_busy_cpus(load)))
    if command.command == "doctor":
        return doctor_command(command, question)
    return plan_command(command, question, started)


def setting_groups(argv: Sequence[str]) -> dict[str, type[Settings]]:
    """Return the settings that a command may need beside the launcher's.

    `run` needs no others, and starts sooner without importing them.
    """
    if argv[:1] == ["run"]:
        return {}
    from entrypoint.tune.search import TuneSettings
    from train.settings import TrainSettings

    return {"train": TrainSettings, "tune": TuneSettings}


def plan_command(command: CommandLine, question: PlanInputs, started: float) -> int:
    """Make the plan, then print it, or launch what it says."""
    question, tuned = plans.apply_saved_tuning(command, question)
    plan = plans.build_plan(command, question)
    plan = annotate(plan, tuned) if tuned else plan
    if command.json:
        print(plan.to_json(indent=2))
    elif not command.launches:
        print("\n".join(plan_lines(plan, command=True)))
    if not command.launches:
        return ExitCode.DONE
    if question.job.rank == 0 and not question.settings.values.quiet:
        only = "launcher" if plan.launcher in REMOTE_LAUNCHERS else ""  # each rank's node shows the rest
        print("\n".join(plan_lines(plan, only=only)), file=sys.stderr)
    launch(plan, question.job, question.environ, started)


def tune_command(command: CommandLine, question: PlanInputs) -> int:
    """Try plans for the program and keep the fastest."""
    from entrypoint.tune.search import TuneSettings, tune

    settings = read_settings(TuneSettings, question.environ, command.tune_flags).values
    training = plans.settings_affecting_speed(command, question)
    plan = plans.build_plan(command, question)
    flags = {variable_name("TRAIN_", name): value for name, value in command.train_flags.items()}
    question = replace(question, environ={**question.environ, **flags})
    return tune(question, plan, settings, training, command.words)


def doctor_command(command: CommandLine, question: PlanInputs) -> int:
    """Print every check; exit code 3 if one fails."""
    from entrypoint.doctor import report

    checks = report.run_checks(question, plans.planner_for(command, question), plans.run_folders(command, question))
    print(report.format_report(checks, as_json=command.json))
    return ExitCode.MACHINE if any(check.state == "failure" for check in checks) else ExitCode.DONE


def verify_command(command: CommandLine) -> int:
    """Print what the ranks on this node have, compared with their plans; exit code 3 if they differ."""
    from entrypoint.doctor.running_ranks import as_json, describe, verify_running

    ranks = verify_running(command.processes)
    print(as_json(ranks) if command.json else "\n".join(line for one in ranks for line in describe(one)))
    return ExitCode.MACHINE if any(one.lines for one in ranks) else ExitCode.DONE
