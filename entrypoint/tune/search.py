"""`entrypoint tune`: find the fastest plan for this program on this node by trials, and store it for later plans."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from msgspec import Meta, Struct, field

from entrypoint.core.console import log, write_stderr, write_stdout
from entrypoint.core.errors import ExitCode, UserError, one_line
from entrypoint.core.setting_types import about
from entrypoint.core.settings_base import Settings
from entrypoint.plan.inputs import PlanInputs
from entrypoint.plan.model import Plan
from entrypoint.tune.candidates import Candidate, later_stages, rank_thread_layouts
from entrypoint.tune.store import is_tunable, machine_program_key, save, store_dir
from entrypoint.tune.successive_halving import Ranking, successive_halving
from entrypoint.tune.trial import TrialSpec, compile_metric, run_trial


class TuneSettings(Settings, frozen=True, kw_only=True):
    """The tuner's settings, each a variable TUNE_<NAME> and a flag --<name> before the program."""

    PREFIX: ClassVar[str] = "TUNE_"

    minutes: Annotated[
        Annotated[float, Meta(gt=0, le=10**4)],
        about("Minutes after which the search stops with what is known.", basic=True),
    ] = 15.0
    seconds: Annotated[
        Annotated[float, Meta(gt=0, le=3600)],
        about("Seconds that each trial is measured, after its warm-up.", basic=True),
    ] = 3.0
    metric: Annotated[
        str,
        about(
            "tune run: a pattern with one group that finds the rate in the script's output."
            " Unset: the script's run time.",
            basic=True,
        ),
    ] = ""
    lower: Annotated[bool, about("tune run: a lower metric is better.", basic=True)] = False


class Search(Struct):
    """One search: how trials run, its deadline, their number, and the plans tried, again in each stage."""

    spec: TrialSpec
    deadline: float
    trials: int = 0
    tried: list[Candidate] = field(default_factory=list)

    @property
    def unit(self) -> str:
        """Return the unit of rates, with a space before it."""
        return " images/s" if self.spec.is_trainer else ""

    @property
    def measured(self) -> dict[str, Candidate]:
        """Return the plans that have rates, each as its last stage has it, by their text."""
        return {str(candidate): candidate for candidate in self.tried if candidate.rates}

    def in_time(self) -> bool:
        """Return whether there is time for another trial."""
        return time.monotonic() < self.deadline

    def measure(self, candidate: Candidate) -> None:
        """Run a trial, note the candidate's rate or why it cannot run, and print that."""
        outcome = run_trial(self.spec, candidate.variables)
        self.trials += 1
        if isinstance(outcome, str):
            candidate.problem, shown = outcome, "cannot run"
        else:
            candidate.rates.append(outcome)
            shown = f"{rate_text(outcome)}{self.unit}"
        problem = f": {candidate.problem}" if candidate.problem else ""
        write_stderr(f"  trial {self.trials:>3}  {shown:>14}  {candidate}{problem}")

    def compare(self, variants: Iterable[Mapping[str, str]]) -> Ranking | None:
        """Return the ranking of these plans and the untuned one, None if none can run."""
        failed = [candidate.variables for candidate in self.tried if candidate.problem]
        plans: list[Mapping[str, str]] = []
        for variables in ({}, *variants):
            if variables not in (*plans, *failed):
                plans.append(variables)
        candidates = [Candidate(variables) for variables in plans]
        self.tried += candidates
        return successive_halving(candidates, self.measure, self.in_time)


def tune(
    inputs: PlanInputs, plan: Plan, settings: TuneSettings, training: Mapping[str, Any], words: Sequence[str]
) -> int:
    """Search, print the result, and store it; `words` is the program's command line after `entrypoint`.

    Raises `UserError` if a launcher has decided already, if nothing can be stored or measured, or for a metric that
    cannot find a rate.
    """
    folder = store_dir(inputs)
    if not is_tunable(inputs):
        raise UserError("tune: needs one node, and to start the ranks itself. Run it outside srun and mpirun.")
    if folder is None:
        raise UserError("LAUNCH_TUNING_STORE=off: results cannot be stored. Unset it, or name a folder.")
    is_trainer = inputs.program.kind == "train"
    spec = TrialSpec(
        words=tuple(words),
        environ=inputs.environ,
        seconds=settings.seconds,
        is_trainer=is_trainer,
        metric=compile_metric(settings.metric) if settings.metric and not is_trainer else None,
        lower=settings.lower,
    )
    path = folder / f"{machine_program_key(inputs, training)}.json"
    program = one_line(" ".join(words))
    log(f"tuning {program} for up to {settings.minutes:g} min. Its result will be stored in {one_line(path)}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a trial has a session of its own, and must not stay
    search = Search(spec, time.monotonic() + settings.minutes * 60)
    ranking = find_fastest(search, inputs, plan)
    if ranking is None:
        problem = next((candidate.problem for candidate in search.tried if candidate.problem), "no time for a trial")
        raise UserError(f"tune: no plan gave a rate: {problem}")
    write_stdout("\n".join(format_report(ranking, search)))
    if not ranking.beats_untuned and not search.in_time():
        write_stdout("no plan is significantly faster yet, and time is up. Nothing is stored. Raise TUNE_MINUTES.")
        return ExitCode.DONE
    evidence = describe(ranking, search)
    variables = ranking.best.variables if ranking.beats_untuned else {}
    save(path, {"program": program, "variables": variables, "evidence": evidence})
    write_stdout(evidence)
    return ExitCode.DONE


def find_fastest(search: Search, inputs: PlanInputs, plan: Plan) -> Ranking | None:
    """Compare the layouts of ranks and threads, then for the best layout runtimes, allocators and bindings.

    A later stage that has no time to end does not undo the stage before.
    """
    ranking = search.compare(rank_thread_layouts(inputs, plan))
    for variants in later_stages(inputs, plan.device):
        if ranking and any(variants):
            best = ranking.best.variables
            later = search.compare([best, *({**best, **variables} for variables in variants)])
            ranking = later if later and search.in_time() else ranking
    return ranking


def rate_text(rate: float) -> str:
    """Return a rate with about four digits, and never as a power of ten."""
    return f"{rate:,.0f}" if rate >= 1000 else f"{rate:.4g}"


def describe(ranking: Ranking, search: Search) -> str:
    """Return the evidence for a result: rate, gain, number of plans, and date."""
    measured, when = search.measured, time.strftime("%Y-%m-%d")
    if not ranking.beats_untuned:
        return f"no plan of {len(measured)} tried was faster than the untuned one, {when}"
    best, untuned = ranking.best.rate, measured.get(str(Candidate()))  # the untuned plan may not run
    gain = f", {best / untuned.rate:.2f} times the untuned plan's" if untuned else ""
    return f"{rate_text(best)}{search.unit}{gain}: the best of {len(measured)} plans tried, {when}"


def format_report(ranking: Ranking, search: Search) -> list[str]:
    """Return a table of all measured plans, fastest first, and of those that cannot run."""
    ranked = sorted(search.measured.values(), key=lambda candidate: -candidate.rate)
    rows = [
        f"{rate_text(one.rate):>10}{one.rate / ranking.best.rate:>13.2f}{len(one.rates):>8}  {one}" for one in ranked
    ]
    failed = [f"{one}: cannot run: {one.problem}" for one in search.tried if one.problem]
    return [f"{'rate':>10}  of the best  trials  plan", *rows, *failed]
