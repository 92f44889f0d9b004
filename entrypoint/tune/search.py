"""`entrypoint tune`: find the fastest plan for this program on this node by trials, and store it for later plans."""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from msgspec import Meta, Struct, field

from entrypoint.core.console import log, write_stderr, write_stdout
from entrypoint.core.errors import ExitCode, UserError, one_line
from entrypoint.core.setting_types import about
from entrypoint.core.settings_base import Settings
from entrypoint.plan.inputs import PlanInputs
from entrypoint.plan.model import Plan
from entrypoint.tune.candidates import BASELINE, Candidate, later_stages, rank_thread_layouts
from entrypoint.tune.store import is_tunable, machine_program_key, save, store_dir
from entrypoint.tune.successive_halving import ComparisonResult, successive_halving
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


class TuningSession(Struct):
    """One search: how trials run, its deadline, their number, and the rates and errors so far."""

    spec: TrialSpec
    deadline: float
    trials: int = 0
    rates: dict[Candidate, list[float]] = field(default_factory=dict)
    errors: dict[Candidate, str] = field(default_factory=dict)

    @property
    def unit(self) -> str:
        """Return the unit of rates, with a space before it."""
        return " images/s" if self.spec.is_trainer else ""

    def in_time(self) -> bool:
        """Return whether there is time for another trial."""
        return time.monotonic() < self.deadline

    def measure(self, candidate: Candidate) -> float | None:
        """Return a candidate's rate in a new trial, and print it; None if the program cannot run with it."""
        if candidate in self.errors:
            return None
        outcome = run_trial(self.spec, candidate)
        self.trials += 1
        trial = f"  trial {self.trials:>3}"
        if isinstance(outcome, str):
            self.errors[candidate] = outcome
            write_stderr(f"{trial}      cannot run  {candidate}: {outcome}")
            return None
        self.rates.setdefault(candidate, []).append(outcome)
        write_stderr(f"{trial}  {f'{rate_text(outcome)}{self.unit}':>14}  {candidate}")
        return outcome

    def compare(self, candidates: Sequence[Candidate]) -> ComparisonResult[Candidate] | None:
        """Return the comparison of candidates with the untuned plan, None if none can run."""
        distinct = list(dict.fromkeys((BASELINE, *candidates)))
        return successive_halving(distinct, self.measure, [BASELINE], self.in_time)


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
    session = TuningSession(spec, time.monotonic() + settings.minutes * 60)
    result = search(session, inputs, plan)
    if result is None:
        raise UserError(f"tune: no plan gave a rate: {next(iter(session.errors.values()), 'no time for a trial')}")
    write_stdout("\n".join(format_report(result, session)))
    is_faster = is_faster_than_planned(result)
    if not is_faster and not session.in_time():
        write_stdout("no plan is significantly faster yet, and time is up. Nothing is stored. Raise TUNE_MINUTES.")
        return ExitCode.DONE
    evidence = describe(result, session)
    save(
        path, {"program": program, "variables": dict(result.best.variables) if is_faster else {}, "evidence": evidence}
    )
    write_stdout(evidence)
    return ExitCode.DONE


def search(session: TuningSession, inputs: PlanInputs, plan: Plan) -> ComparisonResult[Candidate] | None:
    """Compare the layouts of ranks and threads, then for the best layout runtimes, allocators and bindings.

    A later stage that has no time to end does not undo the stage before.
    """
    result = session.compare(rank_thread_layouts(inputs, plan))
    for variants in later_stages(inputs, plan.device):
        if result and any(variants):
            best = result.best
            later = session.compare([best, *(best.with_variables(variables) for variables in variants)])
            result = later if later and session.in_time() else result
    return result


def is_faster_than_planned(result: ComparisonResult[Candidate]) -> bool:
    """Return whether the best candidate is significantly faster than the untuned plan."""
    return BASELINE not in (result.best, *result.ties)


def rate_text(rate: float) -> str:
    """Return a rate with about four digits, and never as a power of ten."""
    return f"{rate:,.0f}" if rate >= 1000 else f"{rate:.4g}"


def describe(result: ComparisonResult[Candidate], session: TuningSession) -> str:
    """Return the evidence for a result: rate, gain, number of plans, and date."""
    count, when = len(session.rates), time.strftime("%Y-%m-%d")
    if not is_faster_than_planned(result):
        return f"no plan of {count} tried was faster than the untuned one, {when}"
    best, untuned = result.median(result.best), result.rates.get(BASELINE)  # the untuned plan may not run
    gain = f", {best / statistics.median(untuned):.2f} times the untuned plan's" if untuned else ""
    return f"{rate_text(best)}{session.unit}{gain}: the best of {count} plans tried, {when}"


def format_report(result: ComparisonResult[Candidate], session: TuningSession) -> list[str]:
    """Return a table of all measured plans, fastest first, and of those that cannot run."""
    medians = {candidate: statistics.median(rates) for candidate, rates in session.rates.items()}
    lines = [f"{'rate':>10}  of the best  trials  plan"]
    for candidate in sorted(medians, key=lambda candidate: -medians[candidate]):
        share, trials = medians[candidate] / medians[result.best], len(session.rates[candidate])
        lines.append(f"{rate_text(medians[candidate]):>10}{share:>13.2f}{trials:>8}  {candidate}")
    return lines + [f"{candidate}: cannot run: {problem}" for candidate, problem in session.errors.items()]
