"""One run, followed from here: environment, machine and job → plan → launch → rank → program."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

# The folder that holds both our packages goes first: a train.py of the user's, in the current folder or on
# PYTHONPATH, must not be taken for ours. This process only plans, so the user's program is not affected.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from entrypoint.errors import Exit, Refused, report
from entrypoint.interpreter import uncollected
from entrypoint.job import Job, read_job
from entrypoint.plan import VARIABLE, Plan

if TYPE_CHECKING:
    from entrypoint.cli import Request
    from entrypoint.question import Question
    from entrypoint.settings import LaunchSettings
    from entrypoint.tuned import Tuned
    from entrypoint.variables import Given, Settings


def main() -> int:
    """Run the command line and return the exit code; a refusal is one line on standard error."""
    try:
        if sys.argv[1:] == ["rank"]:
            rank_stage(os.environ)
        code = node_stage(sys.argv[1:], dict(os.environ))
        sys.stdout.flush()  # here a reader that has gone is no error yet
        return code
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
    from entrypoint import neighbours

    since = neighbours.start()
    with uncollected():
        from entrypoint import cli
        from entrypoint.launch import STARTERS, launch
        from entrypoint.launcher_defaults import without_defaults
        from entrypoint.places import stand_in
        from entrypoint.rank import replace_process
        from entrypoint.selftest import selftest_command
        from entrypoint.settings import read_launch_settings
        from entrypoint.show import plan_lines
        from entrypoint.surroundings import read_image
        from entrypoint.tuned import tell

        training = train_settings_of(argv)

    request = cli.parse(argv, training, in_image=bool(read_image(Path("/"))))
    if request.verb == "help":
        print(cli.help_text())
        return Exit.DONE
    if request.verb == "verify":
        return show_running(request)
    instead = stand_in(environ, make=request.starts)
    environ = {**environ, **{name: value for name, (value, _) in instead.items()}}
    if request.verb in ("other", "selftest"):
        replace_process(request.program.argv if request.program else selftest_command(), environ)
    settings, job = read_launch_settings(environ, request.launch_flags), read_job(environ)
    question = replace(ask(request, settings, job, without_defaults(environ, job)), substitutes=instead)
    if request.verb == "tune":  # which tries plans as they are, whoever is beside them
        return find_fastest(request, question)
    question = replace(question, machine=replace(question.machine, kept_busy=neighbours.kept_busy(since)))
    if request.verb == "doctor":
        return show_checks(request, question)
    question, tuned = take_up(request, question)
    plan = draw_plan(request, question)
    plan = tell(plan, tuned) if tuned else plan
    if "--json" in request.switches:
        print(plan.to_json(indent=2))
    elif not request.starts:
        print("\n".join(plan_lines(plan, command=True)))
    if not request.starts:
        return Exit.DONE
    if job.rank == 0 and not settings.values.quiet:
        only = "launcher" if plan.launcher in STARTERS else ""  # each rank's node shows the rest
        print("\n".join(plan_lines(plan, only=only)), file=sys.stderr)
    launch(plan, question.job, question.environ, started)


def train_settings_of(argv: Sequence[str]) -> type[Settings] | None:
    """Return the trainer's settings; none for `run`, which does not read them and starts 0.02 s sooner without."""
    if argv[:1] == ["run"]:
        return None
    from train.settings import TrainSettings

    return TrainSettings


def ask(request: Request, settings: Given[LaunchSettings], job: Job, environ: Mapping[str, str]) -> Question:
    """Read the machine, and try out what no file tells."""
    from entrypoint.backends import problem_of
    from entrypoint.launcher_defaults import read_mask, refuse_mixed_up
    from entrypoint.libraries import broken_preloads
    from entrypoint.machine import read_machine
    from entrypoint.nodes import read_nodes
    from entrypoint.plan import Program
    from entrypoint.question import Question
    from entrypoint.starters import find_starter

    nodes = read_nodes(settings, environ, job)
    if settings.values.with_ == "auto" and nodes.count == 1:
        refuse_mixed_up(job)
    if job.starts_own(settings.values):  # then this task is the node's, and the ranks are still to be started
        job = Job(id=job.id, granted_cpus=job.granted_cpus, node_cpus=job.node_cpus, nodes=job.nodes, master=job.master)
    mask, settled, squeezed_to = read_mask(job)
    return Question(
        settings,
        replace(read_machine(affinity=mask), squeezed_to=squeezed_to),
        settled,
        # -I: our trainer runs with what is installed beside it, whatever PYTHONPATH, ~/.local or this folder hold.
        request.program or Program("train", (sys.executable, "-I", "-m", "train")),
        environ,
        backend_problem=problem_of(settings.values.backend, sys.executable),
        broken_preloads=broken_preloads(environ.get("LD_PRELOAD", "")),
        nodes=nodes,
        starter=find_starter(settings.values, job, nodes.count, environ),
        token=f"{socket.gethostname()}-{os.getpid()}",
    )


def take_up(request: Request, question: Question) -> tuple[Question, Tuned | None]:
    """Put what was found for this program on such a machine where a person has set nothing; return both."""
    from entrypoint.tuned import apply, find

    tuned = find(question, lambda: speed_settings(request, question))
    return (apply(question, tuned, request.launch_flags), tuned) if tuned else (question, None)


def speed_settings(request: Request, question: Question) -> Mapping[str, Any]:
    """Return the trainer's settings that bear on speed, as JSON has them; none for a person's own script."""
    if request.program is not None:
        return {}
    from train.settings import read_train_settings
    from train.survey import survey

    values = read_train_settings(question.environ, request.train_flags).values
    return {**values.that_bear_on_speed(), "shape": survey(values).shape}


def find_fastest(request: Request, question: Question) -> int:
    """Try plans for the program and keep the fastest."""
    from entrypoint.tune import PREFIX, TuneSettings, tune
    from entrypoint.variables import read_settings, variable_name
    from train.settings import PREFIX as TRAIN_PREFIX

    settings = read_settings(TuneSettings, PREFIX, question.environ, request.tune_flags).values
    training: Mapping[str, Any] = speed_settings(request, question)
    plan = draw_plan(request, question)
    flags = {variable_name(TRAIN_PREFIX, name): value for name, value in request.train_flags.items()}
    question = replace(question, environ={**question.environ, **flags})
    return tune(question, plan, settings, training, request.words)


def draw_plan(request: Request, question: Question) -> Plan:
    """Plan; for our own trainer also what its data and settings call for."""
    from entrypoint.planner import make_plan
    from entrypoint.starters import with_starter

    if request.program is not None:
        return with_starter(make_plan(question), question)
    from train.begun import plan_before
    from train.naming import fresh
    from train.planning import most_ranks, plan_training
    from train.recipes import with_recipe
    from train.settings import read_train_settings
    from train.survey import survey

    given = read_train_settings(question.environ, request.train_flags)
    facts = survey(given.values)
    question = replace(question, before=plan_before(given.values), most_ranks=most_ranks(given.values, facts))
    training, plan = with_recipe(given, make_plan(question))
    free_name = fresh(training.values.output_dir, training.values).name if plan.max_restarts else ""
    plan = plan_training(plan, training, facts, question.machine, free_name)
    return with_starter(plan, question)


def show_checks(request: Request, question: Question) -> int:
    """Print every check of the doctor; exit 3 where one fails."""
    from entrypoint.doctor import examine, report
    from train.cache import cache_folder
    from train.settings import read_train_settings

    training = read_train_settings(question.environ, request.train_flags).values
    folders = [("TRAIN_OUTPUT_DIR", training.output_dir), ("TRAIN_CACHE_DIR", cache_folder(training.cache_dir))]
    checks = examine(question, lambda: draw_plan(request, question), folders)
    print(report(checks, as_json="--json" in request.switches))
    return Exit.MACHINE if any(check.state == "failure" for check in checks) else Exit.DONE


def show_running(request: Request) -> int:
    """Print what the ranks that run here have, beside their plans; exit 3 where they differ."""
    from entrypoint.running import as_json, describe, verify_running

    ranks = verify_running(request.processes)
    print(
        as_json(ranks) if "--json" in request.switches else "\n".join(line for one in ranks for line in describe(one))
    )
    return Exit.MACHINE if any(one.lines for one in ranks) else Exit.DONE


def rank_stage(environ: Mapping[str, str]) -> NoReturn:
    """Become one rank's program by the plan that the node stage left in the environment."""
    from entrypoint.rank import become_program

    try:
        plan = Plan.from_variable(environ[VARIABLE])
    except (KeyError, TypeError, ValueError):
        raise Refused(
            f"{VARIABLE}: no plan of the node stage; `entrypoint rank` is started by the launcher, not by hand"
        ) from None
    become_program(plan, read_job(environ), environ)


if __name__ == "__main__":
    sys.exit(main())
