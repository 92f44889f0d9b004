"""`entrypoint tune`: find the fastest plan for this program on this node by trials, and store it for later plans."""

from __future__ import annotations

import json
import signal
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from entrypoint.core.console import log, write_stderr, write_stdout
from entrypoint.core.errors import ExitCode, UserError, one_line
from entrypoint.core.paths import read_regular
from entrypoint.core.settings_base import Settings
from entrypoint.machine.cpu_load import busy_cpus_note, sample_busy_cpus
from entrypoint.plan.inputs import PlanInputs
from entrypoint.plan.model import Plan
from entrypoint.plan.planner import make_plan
from entrypoint.plan.runtime_libraries import AFFINITY_VARIABLES
from entrypoint.tune.candidates import (
    BASELINE,
    RANKS,
    Candidate,
    binding_candidates,
    rank_thread_layouts,
    runtime_candidates,
    worker_candidates,
)
from entrypoint.tune.store import (
    BUSY_CPUS_KEY,
    RESULT_KEY,
    TunedPlan,
    apply_tuning,
    is_tunable,
    machine_program_key,
    save,
    store_dir,
)
from entrypoint.tune.successive_halving import ComparisonResult, successive_halving
from entrypoint.tune.trial import (
    TrialResult,
    TrialSpec,
    mean_rate,
    metric_rates,
    run_trial,
    trainer_rates,
    wall_time_rate,
)


class TuneSettings(Settings, frozen=True, kw_only=True):
    """The tuner's settings, each a variable TUNE_<NAME> and a flag --<name> before the program."""

    PREFIX: ClassVar[str] = "TUNE_"
    BASIC: ClassVar[tuple[str, ...]] = ("minutes", "seconds", "metric", "lower")

    minutes: Annotated[
        Annotated[float, Meta(gt=0, le=10**4)],
        Meta(description="Minutes after which the search stops with what is known. The same command resumes it."),
    ] = 15.0
    seconds: Annotated[
        Annotated[float, Meta(gt=0, le=3600)],
        Meta(description="Seconds that each trial is measured, after its warm-up."),
    ] = 3.0
    metric: Annotated[
        str,
        Meta(
            description="tune run: a pattern with one group that finds the rate in the script's output."
            " Unset: the script's run time."
        ),
    ] = ""
    lower: Annotated[bool, Meta(description="tune run: a lower metric is better.")] = False


class TuningSession(Struct):
    """One search: its trial specification, file, metadata and deadline, earlier trials and new ones.

    `busy_cpus` are the CPUs that other processes used before each trial.
    """

    spec: TrialSpec
    path: Path
    metadata: Mapping[str, Any]
    deadline: float
    previous_rates: dict[Candidate, list[float]]
    busy_cpus: list[float]
    rates: dict[Candidate, list[float]] = field(default_factory=dict)
    startup_s: dict[Candidate, float] = field(default_factory=dict)
    errors: dict[Candidate, str] = field(default_factory=dict)

    def measure(self, candidate: Candidate) -> float | None:
        """Return a candidate's rate, from an interrupted search if it has one, else from a new trial."""
        if candidate in self.errors:
            return None
        rates = self.rates.setdefault(candidate, [])
        if len(rates) < len(self.previous_rates.get(candidate, ())):
            rates.append(self.previous_rates[candidate][len(rates)])
            return rates[-1]
        self.busy_cpus.append(round(sample_busy_cpus(), 2))
        result = run_trial(self.spec, candidate)
        if result.rate is None:
            self.errors[candidate] = result.error
        else:
            rates.append(result.rate)
            self.startup_s.setdefault(candidate, result.startup_s)
            self.store(None)
        self.print_trial(candidate, result)
        return result.rate

    def print_trial(self, candidate: Candidate, result: TrialResult) -> None:
        """Print the result of a trial."""
        count = sum(map(len, self.rates.values())) + len(self.errors)
        rate = f"{result.rate:,.4g}{UNITS[self.spec.is_trainer]}" if result.rate else "cannot run"
        problem = f": {result.error}" if result.error else ""
        write_stderr(f"  trial {count:>3}  {rate:>14}  {candidate}{problem}")

    def in_time(self) -> bool:
        """Return whether there is time for another trial."""
        return time.monotonic() < self.deadline

    def store(self, result: Mapping[str, Any] | None) -> None:
        """Store all results so far atomically, after every trial."""
        trials = [{"variables": dict(one.variables), "rates": seen} for one, seen in self.rates.items() if seen]
        content = {"trials": trials, BUSY_CPUS_KEY: self.busy_cpus, RESULT_KEY: result}
        save(self.path, {**self.metadata, **content})


COMPILED_TRIALS = 3
UNITS = {True: " images/s", False: ""}


def tune(
    inputs: PlanInputs, plan: Plan, settings: TuneSettings, training: Mapping[str, Any], words: Sequence[str]
) -> int:
    """Search, print the result, and store it; `words` is the program's command line after `entrypoint`.

    Raises `UserError` if a launcher has decided already, or if nothing can be stored or measured.
    """
    folder = store_dir(inputs)
    if not is_tunable(inputs):
        raise UserError("tune: needs one node, and to start the ranks itself. Run it outside srun and mpirun.")
    if folder is None:
        raise UserError("LAUNCH_TUNING_STORE=off: results cannot be stored. Unset it, or name a folder.")
    path = folder / f"{machine_program_key(inputs, training)}.json"
    session = TuningSession(
        trial_spec(inputs, settings, words),
        path,
        {"node": plan.machine, "program": " ".join(words)},
        time.monotonic() + settings.minutes * 60,
        *load_unfinished(path),
    )
    log(
        f"tuning {one_line(' '.join(words))} for up to {settings.minutes:g} minutes. Stop it at any time; results are"
        f" stored in {one_line(path)}"
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        result, compared = search(session, inputs, plan)
        lines = try_compile(session, result) if result and "TRAIN_COMPILE" not in inputs.environ else []
    except KeyboardInterrupt:
        log("stopped; run the same command to resume")
        return ExitCode.INTERRUPTED
    if result is None:
        raise UserError(f"tune: no plan gave a rate: {next(iter(session.errors.values()), 'no time for a trial')}")
    variables, evidence = select_result(result, session)
    write_stdout("\n".join(format_report(result, session, compared, plan.nodes.nproc_per_node) + lines))
    if not session.in_time() and not is_faster_than_planned(result):
        session.store(None)
        write_stdout("no plan is significantly faster yet, and time is up; run the same command to continue")
        return ExitCode.DONE
    cut_short = not session.in_time() and any(one != result.best for one in result.ties)
    session.store({"variables": variables, "evidence": evidence})
    write_stdout(evidence + ("; time was up before they could be distinguished" if cut_short else ""))
    return ExitCode.DONE


def trial_spec(inputs: PlanInputs, settings: TuneSettings, words: Sequence[str]) -> TrialSpec:
    """Return how trials run the program."""
    environ = {**inputs.environ, **inputs.settings.as_variables(flags_only=True)}
    if inputs.program.kind == "train":
        return TrialSpec(tuple(words), environ, settings.seconds, trainer_rates, is_trainer=True, mean=mean_rate)
    read_rates = metric_rates(settings.metric, lower=settings.lower) if settings.metric else wall_time_rate
    return TrialSpec(tuple(words), environ, settings.seconds, read_rates)


def load_unfinished(path: Path) -> tuple[dict[Candidate, list[float]], list[float]]:
    """Return the trials and the busy CPUs of an interrupted search; empty after a complete search."""
    try:
        known = json.loads(read_regular(path))
        if known[RESULT_KEY]:
            return {}, []
        trials = {Candidate.from_variables(one["variables"]): list(one["rates"]) for one in known["trials"]}
        return trials, list(known[BUSY_CPUS_KEY])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}, []


Best = ComparisonResult[Candidate]


def search(session: TuningSession, inputs: PlanInputs, plan: Plan) -> tuple[Best | None, Best | None]:
    """Compare the layouts of ranks and threads, then for the best layout runtimes, bindings and loader workers.

    Returns the last result, and the result of the layouts.
    """

    def among(candidates: Sequence[Candidate]) -> Best | None:
        different = {plan_signature(inputs, one): one for one in reversed(candidates)}  # the first of equal plans stays
        return successive_halving(list(different.values())[::-1], session.measure, [BASELINE], session.in_time)

    layout_result = result = among(rank_thread_layouts(inputs, plan.device))
    stages = (
        runtime_candidates(inputs, plan.device),
        binding_candidates(inputs, plan.device),
        worker_candidates(inputs, plan),
    )
    for more in stages:
        if result and session.in_time() and len(more) > 1:
            result = more_certain(
                result, among([BASELINE, result.best, *(result.best.with_variables(variables) for variables in more)])
            )
    return result, layout_result


def more_certain(before: Best, later: Best | None) -> Best:
    """Return the later result, unless only the earlier one is significantly faster than the untuned plan."""
    if later is None or (is_faster_than_planned(before) and not is_faster_than_planned(later)):
        return before
    return later


def is_faster_than_planned(result: Best) -> bool:
    """Return whether the best candidate is significantly faster than the untuned plan."""
    return BASELINE not in (result.best, *result.ties)


def try_compile(session: TuningSession, result: Best) -> list[str]:
    """Measure the best plan with torch.compile, and return from which run length that pays; it is not stored."""
    if not session.spec.is_trainer:
        return []
    candidate = result.best.with_variables({"TRAIN_COMPILE": "default"})
    rates = [session.measure(candidate) for _ in range(COMPILED_TRIALS) if session.in_time()]
    seen = [rate for rate in rates if rate is not None]
    if not seen:
        return []
    gain = statistics.median(seen) / result.median(result.best)
    if gain <= 1:
        return [f"compiled it is no faster ({gain:.2f} times the rate)"]
    if not {candidate, result.best} <= set(session.startup_s):  # rates of an earlier search
        return [f"compiled it makes {gain:.2f} times the rate, after a longer start"]
    cost_s = max(0.0, session.startup_s[candidate] - session.startup_s[result.best])
    pays_s = cost_s / (1 - 1 / gain)
    return [
        f"compiled it makes {gain:.2f} times the rate after {cost_s:.0f} s more to start: TRAIN_COMPILE=default pays"
        f" in runs of over {pays_s / 60:.0f} minutes"
    ]


def plan_signature(inputs: PlanInputs, candidate: Candidate) -> object:
    """Return a value that is equal for equal plans, so that one of them is measured; a trial reports errors."""
    variables = dict(candidate.variables)
    try:
        plan = make_plan(apply_tuning(inputs, TunedPlan(variables, "", Path()), {}))
    except UserError:
        return candidate
    ranks = plan.ranks
    if plan.binding.cpu_binding == "none":
        everywhere = tuple(cpu.id for cpu in inputs.machine.cpus)
        ranks = tuple(replace(rank, cpus=everywhere) for rank in ranks)
    same = ["LAUNCH_"]
    if all(len(rank.cpus) == 1 for rank in ranks):
        same += AFFINITY_VARIABLES  # there is nothing to pin
    others = {name: value for name, value in variables.items() if not name.startswith("LAUNCH_")}
    environment = {
        name: value for name, value in plan.environment.variables.items() if not name.startswith(tuple(same))
    }
    return ranks, plan.environment.preload, tuple(sorted({**environment, **others}.items()))


def select_result(result: Best, session: TuningSession) -> tuple[Mapping[str, str], str]:
    """Return the variables to store and the evidence; no variables if the untuned plan is as fast."""
    tried = sum(1 for seen in session.rates.values() if seen)
    when = time.strftime("%Y-%m-%d") + busy_cpus_note(session.busy_cpus)
    unit = UNITS[session.spec.is_trainer]
    best, untuned = result.median(result.best), result.rates.get(BASELINE)
    if result.best == BASELINE or BASELINE in result.ties:
        return {}, f"no plan of {tried} tried was faster than the untuned one, {when}"
    gain = f", {best / result.median(BASELINE):.2f} times the untuned plan's" if untuned else ""
    return dict(result.best.variables), f"{best:,.4g}{unit}{gain}: the best of {tried} plans tried, {when}"


def format_report(result: Best, session: TuningSession, layout_result: Best | None, planned: int) -> list[str]:
    """Return a table of all measured plans, fastest first, and a comparison of many ranks with one."""
    medians = {one: statistics.median(seen) for one, seen in session.rates.items() if seen}
    top = medians[result.best]
    lines = [f"{'rate':>10}  of the best  trials           plan"]
    for one, rate in sorted(medians.items(), key=lambda item: -item[1]):
        mark = "best" if one == result.best else "as fast" if one in result.ties else ""
        lines.append(f"{rate:>10,.4g}{rate / top:>13.2f}{len(session.rates[one]):>8}  {mark:<7}  {one}")
    lines += [f"{one}: cannot run: {problem}" for one, problem in session.errors.items()]
    ranks = {
        one: dict(one.variables).get(RANKS, str(planned)) for one in (layout_result.rates if layout_result else ())
    }
    one_wide = [one for one, number in ranks.items() if number == "1"]
    many = [one for one, number in ranks.items() if number != "1"]
    if layout_result and one_wide and many:
        wide, small = (max(group, key=layout_result.median) for group in (one_wide, many))
        share = layout_result.median(small) / layout_result.median(wide)
        held = "faster than one wide one, as the book's table 9.2 has it" if share > 1 else "slower than one wide one"
        lines.append(f"many small ranks are {held}: {small} makes {share:.2f} of {wide}")
    return lines
