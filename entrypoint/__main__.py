"""One run, followed from here: environment, machine and job → plan → launch → rank → program."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

# The folder that holds both our packages goes first: a train.py of the user's, in the current folder or on
# PYTHONPATH, must not be taken for ours. This process only plans, so the user's program is not affected.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from entrypoint.errors import Exit, Refused, report
from entrypoint.job import Job, read_job
from entrypoint.plan import VARIABLE, Plan

if TYPE_CHECKING:
    from entrypoint.cli import Request
    from entrypoint.settings import LaunchSettings
    from entrypoint.variables import Given


def main() -> int:
    """Run the command line and return the exit code; a refusal is one line on standard error."""
    try:
        if sys.argv[1:] == ["rank"]:
            rank_stage(os.environ)
        return node_stage(sys.argv[1:], dict(os.environ))
    except Refused as error:
        return report(error)
    except BrokenPipeError:  # `entrypoint plan | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return Exit.DONE
    except KeyboardInterrupt:
        return Exit.INTERRUPTED


def node_stage(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Plan for this node, then show the plan or launch it; `environ` is what the program will get."""
    started = time.time()
    os.environ["PYDANTIC_DISABLE_PLUGINS"] = "1"  # looking for some reads every installed package's metadata
    from entrypoint import cli
    from entrypoint.launch import launch
    from entrypoint.settings import read_launch_settings
    from entrypoint.show import plan_lines
    from train.settings import PREFIX, TrainSettings

    request = cli.parse(argv, TrainSettings)
    if request.verb == "help":
        print(cli.help_text(TrainSettings, PREFIX))
        return Exit.DONE
    settings, job = read_launch_settings(environ, request.launch_flags), read_job(environ)
    plan = draw_plan(request, settings, job, environ)
    if "--json" in request.switches:
        print(plan.to_json(indent=2))
    elif not request.starts:
        print("\n".join(plan_lines(plan, command=True)))
    if not request.starts:
        return Exit.DONE
    if job.rank == 0 and not settings.values.quiet:
        print("\n".join(plan_lines(plan)), file=sys.stderr)
    launch(plan, job, environ, started)


def draw_plan(request: Request, settings: Given[LaunchSettings], job: Job, environ: Mapping[str, str]) -> Plan:
    """Read the machine and plan; for our own trainer also what its data and settings call for."""
    from entrypoint.machine import read_machine
    from entrypoint.plan import Program
    from entrypoint.planner import Question, make_plan

    machine = read_machine()
    # -I: our trainer runs with what is installed beside it, whatever PYTHONPATH, ~/.local or this folder hold.
    program = request.program or Program("train", (sys.executable, "-I", "-m", "train"))
    plan = make_plan(Question(settings, machine, job, program, environ))
    if request.program is None:
        from train.planning import plan_training
        from train.settings import read_train_settings
        from train.survey import survey

        training = read_train_settings(environ, request.train_flags)
        plan = plan_training(plan, training, survey(training.values), machine.memory_bytes)
    return plan


def rank_stage(environ: Mapping[str, str]) -> NoReturn:
    """Become one rank's program by the plan that the node stage left in the environment."""
    from entrypoint.rank import become_program

    try:
        plan = Plan.from_json(environ[VARIABLE])
    except (KeyError, TypeError, ValueError):
        raise Refused(
            f"{VARIABLE}: no plan of the node stage; `entrypoint rank` is started by the launcher, not by hand"
        ) from None
    become_program(plan, read_job(environ), environ)


if __name__ == "__main__":
    sys.exit(main())
