"""One function per command, from the command line to the exit code."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from entrypoint.cli import build_plan as plans
from entrypoint.cli.help import help_all
from entrypoint.cli.parser import SWITCHES, CommandLine, parse_command_line
from entrypoint.core.console import log, report_error, write_stderr, write_stdout
from entrypoint.core.errors import ExitCode, UserError, first_line, printable
from entrypoint.core.process import replace_process, resume_gc
from entrypoint.core.settings_base import Settings, read_settings, variable_name
from entrypoint.core.signals import PREEMPTION
from entrypoint.core.user_dirs import apply_fallbacks
from entrypoint.doctor.selftest import selftest_command
from entrypoint.job.allocation import ALLOCATION_VAR, read_allocation, with_allocation
from entrypoint.job.detect import detect_job
from entrypoint.job.launcher_quirks import drop_thread_default
from entrypoint.job.run_identity import with_run_id
from entrypoint.launch.dispatch import REMOTE_LAUNCHERS, launch
from entrypoint.machine import cpu_load
from entrypoint.machine.container import read_image
from entrypoint.machine.procfs import parent_name
from entrypoint.plan.display import plan_lines
from entrypoint.plan.inputs import PlanInputs
from entrypoint.plan.model import Program
from entrypoint.settings import LaunchSettings, read_launch_settings
from entrypoint.tune.store import annotate


def main() -> int:
    """Run the command line and return the exit code; an error is one line on standard error."""
    if sys.argv[1:2] == ["train"]:  # a scheduler's warning must not end a job that has no rank yet
        signal.pthread_sigmask(signal.SIG_BLOCK, PREEMPTION)
    try:
        return run_command(sys.argv[1:], dict(os.environ))
    except UserError as error:
        return report_error(error)
    except BrokenPipeError:  # `entrypoint plan | head`
        return ExitCode.DONE
    except OSError as error:  # whatever else a machine refuses: a full disk, no more processes or descriptors
        return report_error(os_error_line(error))
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED


def os_error_line(error: OSError) -> UserError:
    """Return the error of one line for what the system refused."""
    where = f"{printable(error.filename)}: " if error.filename else ""
    line = f"{where}{error.strerror or first_line(error)}. `entrypoint doctor` checks this machine."
    return UserError(line, ExitCode.MACHINE)


def run_command(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a command; `environ` is what the program will get."""
    started, load = time.time(), cpu_load.take_sample()
    command = parse_command_line(argv, setting_groups(argv), in_image=bool(read_image(Path("/"))))
    if command.command == "help":
        write_stdout(command.help_text)
        return ExitCode.DONE
    refuse_switches(command)
    if command.network:
        command = network_command(command)
    if command.command in ("settings", "completion"):
        return print_command(command)
    if command.config:
        from entrypoint.cli.config_file import with_config

        environ = with_config(environ, command.config, all_groups())
    if command.command == "verify":
        return verify_command(command)
    if command.command == "stacks":
        return stacks_command(command)
    if command.command == "predict":
        return predict_command(command, environ)
    if command.command in ("report", "compare"):
        return show_command(command)
    if command.command == "evaluate" and not command.train_flags.get("evaluate"):
        raise UserError("evaluate: needs a trained model. Use `entrypoint evaluate RUN`.")
    fallbacks = apply_fallbacks(environ, make=command.launches)
    environ = {**environ, **{name: value for name, (value, _) in fallbacks.items()}}
    if command.command in ("other", "selftest"):
        replace_process(command.program.argv if command.program else selftest_command(), environ)
    allocation = read_allocation(environ)
    job = with_run_id(with_allocation(detect_job(environ, parent_name()), allocation, socket.gethostname()))
    if listed := allocation.to_variable():
        environ = {**environ, ALLOCATION_VAR: listed}
    with plans.telling_other_nodes(command, job, environ):
        settings = read_launch_settings(environ, command.launch_flags)
        inputs = plans.detect_plan_inputs(command, settings, job, drop_thread_default(environ, job))
        inputs = replace(inputs, dir_fallbacks=fallbacks)
    if command.command == "tune":  # its trials use the plan as it is, whatever other processes do
        return tune_command(command, inputs)
    inputs = replace(inputs, machine=replace(inputs.machine, busy_cpus=cpu_load.other_busy_cpus(load)))
    if command.command == "doctor":
        return doctor_command(command, inputs)
    return plan_command(command, inputs, started)


def setting_groups(argv: Sequence[str]) -> dict[str, type[Settings]]:
    """Return the settings that a command may need besides the launcher's.

    `run` needs no others, and starts sooner without importing them.
    """
    if argv[:1] == ["run"]:
        return {}
    from entrypoint.tune.search import TuneSettings
    from train.predict_settings import PredictSettings
    from train.settings import TrainSettings

    return {"train": TrainSettings, "tune": TuneSettings, "predict": PredictSettings}


def refuse_switches(command: CommandLine) -> None:
    """Raise `UserError` for a switch that a command without a plan does not have."""
    if command.json_schema and command.command != "settings":
        raise UserError(f"--json-schema: is for `entrypoint settings`, not for {command.command}. Leave it out.")
    if command.network and command.command != "doctor":
        raise UserError(f"--network: is for `entrypoint doctor`, not for {command.command}. Leave it out.")
    has_no_plan = command.command in ("predict", "report", "compare", "settings", "completion")
    if has_no_plan and (command.dry_run or (command.json and command.command != "predict")):
        switch = "--dry-run" if command.dry_run else "--json"
        raise UserError(f"{switch}: {command.command} has no plan to show. Leave it out.")


def all_groups() -> dict[str, type[Settings]]:
    """Return all settings by the name of their table in a configuration file."""
    return {"launch": LaunchSettings, **setting_groups(())}


def print_command(command: CommandLine) -> int:
    """Print the list of settings, their schema, or the completion of a shell."""
    if command.command == "completion":
        from entrypoint.cli.completion import completion_script

        write_stdout(completion_script(command.words, all_groups(), (*SWITCHES, "config")))
    elif command.json_schema:
        from entrypoint.cli.settings_schema import schema_text

        write_stdout(schema_text(all_groups()))
    else:
        write_stdout(help_all(setting_groups(())))
    return ExitCode.DONE


def plan_command(command: CommandLine, inputs: PlanInputs, started: float) -> int:
    """Make the plan, then print it, or launch what it says."""
    with plans.telling_other_nodes(command, inputs.job, inputs.environ):
        inputs, tuned = plans.apply_saved_tuning(command, inputs)
        plan = plans.build_plan(command, inputs)
        plan = annotate(plan, tuned) if tuned else plan
    if command.json:
        write_stdout(plan.to_json(indent=2))
    elif not command.launches:
        write_stdout("\n".join(plan_lines(plan, command=True)))
    if not command.launches:
        return ExitCode.DONE
    if inputs.job.rank == 0 and plan.prominent_warning:
        log(f"warning: {plan.prominent_warning}")
    if inputs.job.rank == 0 and not inputs.settings.values.quiet:
        only = "launcher" if plan.launcher in REMOTE_LAUNCHERS else ""  # each rank's node shows the rest
        write_stderr("\n".join(plan_lines(plan, only=only)))
    if plan.program.kind == "notebook" and plan.launcher not in REMOTE_LAUNCHERS:  # there each rank has it run
        from entrypoint.launch.notebook import with_notebook_runner

        plan = with_notebook_runner(plan)
    launch(plan, inputs.job, inputs.environ, started)


def tune_command(command: CommandLine, inputs: PlanInputs) -> int:
    """Try plans for the program and keep the fastest."""
    from entrypoint.tune.search import TuneSettings, tune

    resume_gc()
    settings = read_settings(TuneSettings, inputs.environ, command.tune_flags).values
    training = plans.settings_affecting_speed(command, inputs)
    plan = plans.build_plan(command, inputs)
    flags = {variable_name("TRAIN_", name): value for name, value in command.train_flags.items()}
    inputs = replace(inputs, environ={**inputs.environ, **flags})
    return tune(inputs, plan, settings, training, command.words)


def doctor_command(command: CommandLine, inputs: PlanInputs) -> int:
    """Print every check; exit code 3 if one fails."""
    from entrypoint.doctor import report

    checks = report.run_checks(inputs, plans.planner_for(command, inputs), plans.run_folders(command, inputs))
    write_stdout(report.format_report(checks, as_json=command.json))
    return ExitCode.MACHINE if any(check.state == "failure" for check in checks) else ExitCode.DONE


def network_command(command: CommandLine) -> CommandLine:
    """Return the command that measures the network: its program is started as any other, on all nodes of the job."""
    words = ("-m", "entrypoint.doctor.network_speed", *(("--json",) if command.json else ()))
    return replace(
        command,
        command="run",
        program=Program("module", (sys.executable, "-I", *words)),
        launch_flags={"quiet": "1", **command.launch_flags},
        train_flags={},
        words=("run", *words),
        json=False,
    )


def predict_command(command: CommandLine, environ: Mapping[str, str]) -> int:
    """Start the program that predicts; it is one process without ranks."""
    from train.predict_settings import read_predict_settings

    flags = {"format": "json", **command.predict_flags} if command.json else command.predict_flags
    given = read_predict_settings(environ, flags)
    if len(command.words) < 2:
        raise UserError("predict: needs a trained model and images. Use `entrypoint predict RUN IMAGE ...`.")
    words = (sys.executable, "-I", "-m", "train.engine.predict", *command.words)
    replace_process(words, {**environ, **given.as_variables()})


def show_command(command: CommandLine) -> int:
    """Start the program that shows finished runs."""
    if len(command.words) < (2 if command.command == "compare" else 1):
        usage = "compare RUN RUN" if command.command == "compare" else "report RUN"
        raise UserError(f"{command.command}: needs finished runs. Use `entrypoint {usage}`.")
    replace_process(
        (sys.executable, "-I", "-m", "train.report.show", command.command, *command.words), dict(os.environ)
    )


def verify_command(command: CommandLine) -> int:
    """Print what the ranks on this node have, compared with their plans; exit code 3 if they differ."""
    from entrypoint.doctor.running_ranks import as_json, describe, verify_running

    ranks = verify_running(command.processes)
    write_stdout(as_json(ranks) if command.json else "\n".join(line for one in ranks for line in describe(one)))
    return ExitCode.MACHINE if any(one.differences for one in ranks) else ExitCode.DONE


def stacks_command(command: CommandLine) -> int:
    """Print the stacks of the ranks on this node, of runs or processes that the user named."""
    from entrypoint.cli.stacks_command import processes_of
    from entrypoint.doctor.stacks import as_json, describe, stacks_of_ranks

    ranks = stacks_of_ranks(processes_of(command.words))
    write_stdout(as_json(ranks) if command.json else "\n\n".join(map(describe, ranks)))
    return ExitCode.DONE
