"""`entrypoint tune`: find the fastest plan for this program on this node by trials, and store it for later plans."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any, ClassVar, NoReturn

from msgspec import Meta, Struct, field

from entrypoint.core.console import log, write_stderr, write_stdout
from entrypoint.core.errors import ExitCode, UserError, one_line, printable, refuse_if
from entrypoint.core.setting_types import about
from entrypoint.core.settings_base import Settings
from entrypoint.core.user_dirs import why_not_writable
from entrypoint.plan.cpu_budget import compute_cpu_budget
from entrypoint.plan.inputs import PlanInputs
from entrypoint.plan.model import Plan
from entrypoint.plan.runtime_libraries import AFFINITY_VARIABLES, ALLOCATOR_WORD, user_preload
from entrypoint.tune.store import (
    ALLOCATOR,
    BIND,
    OPENMP,
    RANKS,
    THREADS,
    is_tunable,
    machine_program_key,
    save,
    store_dir,
)
from entrypoint.tune.trial import TrialSpec, compile_metric, run_trial

WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
# By OpenMP runtime, what idle threads do: as planned, spin, or sleep at once.
WAIT_POLICIES: Mapping[str, tuple[Mapping[str, str], ...]] = {
    "gnu": ({}, {"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "passive"}),
    "intel": ({}, {"KMP_BLOCKTIME": "200"}, {"KMP_BLOCKTIME": "0"}),
}


class Candidate(Struct, eq=False):
    """A plan by the variables in which it differs from the untuned plan, and its rates."""

    variables: Mapping[str, str] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Return the median rate."""
        return median(self.rates)

    def __str__(self) -> str:
        """Return the variables: `LAUNCH_NPROC_PER_NODE=2 LAUNCH_THREADS=1`."""
        return " ".join(f"{name}={value}" for name, value in self.variables.items()) or "as planned"


def rank_thread_layouts(inputs: PlanInputs, plan: Plan) -> list[dict[str, str]]:
    """Return the numbers of ranks and threads to try besides the plan's; none with GPUs, or if the user set them."""
    fixed = any(inputs.is_set_by_user(name) for name in ("nproc_per_node", "threads", "cpu_binding"))
    if plan.device == "cuda" or fixed:
        return []
    budget = compute_cpu_budget(inputs.machine, inputs.job, inputs.settings.values.core_type)
    layouts = set(even_layouts(len(budget.cores), budget.threads))
    # One rank may leave a core free, or half: where memory limits the speed.
    layouts |= {(1, count) for count in (len(budget.cores), budget.threads - 1, budget.threads // 2) if count}
    layouts.discard((plan.nodes.nproc_per_node, plan.ranks[0].threads))
    return [{RANKS: str(ranks), THREADS: str(threads)} for ranks, threads in sorted(layouts)]


def even_layouts(cores: int, threads: int) -> list[tuple[int, int]]:
    """Return (ranks, threads of each) that use all threads, few ranks first."""
    return [(ranks, threads // ranks) for ranks in range(1, min(cores, threads) + 1) if threads % ranks == 0]


def later_stages(inputs: PlanInputs, device: str) -> tuple[Sequence[Mapping[str, str]], ...]:
    """Return what is tried for the best layout, one stage after the other, as far as the user left it open.

    On a CPU these are OpenMP runtimes with each wait policy, allocators, and CPU bindings. Unbound ranks can be faster
    on a node that other processes use. Results stay bitwise identical.
    """
    allocators = available_choices(inputs, "allocator", ALLOCATOR, ("tcmalloc", "jemalloc", "system"), ALLOCATOR_WORD)
    if device == "cuda":
        return (allocators,)
    is_open = not any(inputs.environ.get(name) for name in WAIT_VARIABLES)
    runtimes = [
        {**runtime, **policy}
        for runtime in available_choices(inputs, "openmp", OPENMP, ("gnu", "intel"), "iomp5")
        for policy in (WAIT_POLICIES[runtime.get(OPENMP, "gnu")] if is_open else ({},))
    ]
    fixed = inputs.is_set_by_user("cpu_binding") or any(inputs.environ.get(name) for name in AFFINITY_VARIABLES)
    return runtimes, allocators, () if fixed else ({BIND: "none"}, {BIND: "threads"})


def available_choices(
    inputs: PlanInputs, field: str, variable: str, names: Iterable[str], word: str
) -> tuple[Mapping[str, str], ...]:
    """Return the values of a setting that are available here; one empty choice if the user has set it."""
    if inputs.is_set_by_user(field) or user_preload(inputs.environ.get("LD_PRELOAD", ""), word):
        return ({},)
    bundled = ("gnu", "system")  # with torch and with libc
    available = [name for name in names if name in bundled or inputs.machine.library(name).path]
    return tuple({variable: name} for name in available) if len(available) > 1 else ({},)


# Each plan of a stage is measured once. The FINALISTS fastest and the untuned plan run ROUNDS times more, by turns.
# A plan that is no faster than the untuned one wins all of these by chance once in 2 ** ROUNDS times.
FINALISTS, ROUNDS = 2, 5


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


class Search(Struct):
    """One search: how trials run, its deadline, their number, and why a plan that was tried cannot run, if so."""

    spec: TrialSpec
    deadline: float
    trials: int = 0
    tried: dict[str, str] = field(default_factory=dict)

    def measure(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Run a trial of each candidate, print what it gave, and return those that can run.

        Raises TimeoutError when the time is up.
        """
        for candidate in candidates:
            if time.monotonic() >= self.deadline:
                raise TimeoutError
            outcome = run_trial(self.spec, candidate.variables)
            self.trials += 1
            if isinstance(outcome, str):
                self.tried[str(candidate)], shown, problem = outcome, "cannot run", f": {outcome}"
            else:
                self.tried[str(candidate)], shown, problem = "", self.shown(outcome), ""
                candidate.rates.append(outcome)
            write_stderr(f"  trial {self.trials:>3}  {shown:>14}  {candidate}{problem}")
        return [candidate for candidate in candidates if not self.tried[str(candidate)]]

    def compare(self, plans: Sequence[Mapping[str, str]]) -> list[Candidate]:
        """Return the fastest of these plans and the untuned one, the best first, as far as they can run."""
        candidates = {str(one): one for one in map(Candidate, ({}, *plans)) if not self.tried.get(str(one))}
        ran = sorted(self.measure([*candidates.values()]), key=lambda candidate: -candidate.rate)
        finalists = ran[:FINALISTS] + [candidate for candidate in ran[FINALISTS:] if not candidate.variables]
        for _ in range(ROUNDS):
            finalists = self.measure(finalists)
        return sorted(finalists, key=lambda candidate: -candidate.rate)

    def shown(self, rate: float) -> str:
        """Return a rate with about four digits, and never as a power of ten, and its unit."""
        number = f"{rate:,.0f}" if rate >= 1000 else f"{rate:.4g}"
        return f"{number} images/s" if self.spec.is_trainer else number


def tune(
    inputs: PlanInputs, plan: Plan, settings: TuneSettings, training: Mapping[str, Any], words: Sequence[str]
) -> int:
    """Search, print the result, and store it; `words` is the program's command line after `entrypoint`.

    Raises `UserError` if a launcher has decided already, if nothing can be stored or measured, or for a metric that
    cannot find a rate.
    """
    found, is_trainer = store_dir(inputs), inputs.program.kind == "train"
    folder = found or Path()
    problem = why_not_writable(folder)
    refuse_if(
        {
            "tune: needs one node, and to start the ranks itself. Run it outside srun and mpirun.": (
                not is_tunable(inputs)
            ),
            "LAUNCH_TUNING_STORE=off: results cannot be stored. Unset it, or name a folder.": found is None,
            f"{printable(folder)}: cannot be written ({problem}). Name another one with LAUNCH_TUNING_STORE.": problem,
            f"TUNE_SECONDS={settings.seconds:g}: one trial takes longer than TUNE_MINUTES={settings.minutes:g}. Lower"
            " it.": settings.seconds > 60 * settings.minutes,
            f"TUNE_METRIC={printable(settings.metric)}: has no effect, as the trainer logs its rates. Unset it.": (
                settings.metric and is_trainer
            ),
        }
    )
    spec = TrialSpec(
        words=tuple(words),
        environ=inputs.environ,
        seconds=settings.seconds,
        is_trainer=is_trainer,
        metric=compile_metric(settings.metric) if settings.metric and not is_trainer else None,
    )
    path = folder / f"{machine_program_key(inputs, training)}.json"
    program = one_line(" ".join(words))
    log(f"tuning {program} for up to {settings.minutes:g} min. Its result will be stored in {one_line(path)}")
    # A trial has a session of its own, and must not stay.
    signal.signal(signal.SIGTERM, stop)
    search = Search(spec, time.monotonic() + settings.minutes * 60)
    finalists = find_fastest(search, inputs, plan)
    problems = list(search.tried.values())
    if not finalists and all(problems):
        raise UserError(f"tune: no plan gave a rate: {problems[0] if problems else 'no time for a trial'}")
    if not finalists:
        write_stdout("no plan is known to be faster yet, and time is up. Nothing is stored. Raise TUNE_MINUTES.")
        return ExitCode.DONE
    evidence = describe(finalists, search)
    variables = finalists[0].variables if is_gain(finalists) else {}
    save(path, {"program": program, "variables": variables, "evidence": evidence})
    write_stdout(evidence)
    return ExitCode.DONE


def stop(*_: object) -> NoReturn:
    """Raise `UserError`, as the handler of SIGTERM; a line from here could meet another one that is written."""
    raise UserError("tune: stopped by SIGTERM, and nothing is stored.", ExitCode.TERMINATED)


def find_fastest(search: Search, inputs: PlanInputs, plan: Plan) -> list[Candidate]:
    """Compare the layouts of ranks and threads, then for the best layout runtimes, allocators and bindings.

    A later stage that has no time to end does not undo a gain of the stage before. Returns the last stage's finalists.
    """
    finalists: list[Candidate] = []
    try:
        finalists = search.compare(rank_thread_layouts(inputs, plan))
        for variants in later_stages(inputs, plan.device):
            if finalists and any(variants):
                best = finalists[0].variables
                finalists = search.compare([best, *({**best, **variables} for variables in variants)]) or finalists
    except TimeoutError:
        return finalists if finalists and is_gain(finalists) else []
    return finalists


def is_gain(finalists: Sequence[Candidate]) -> bool:
    """Return whether the best was faster than the untuned plan, if that runs, each time that they ran by turns."""
    theirs = next((one.rates for one in finalists if not one.variables), [0.0] * (ROUNDS + 1))
    return all(ours > other for ours, other in zip(finalists[0].rates[1:], theirs[1:], strict=True))


def describe(finalists: Sequence[Candidate], search: Search) -> str:
    """Return the evidence for a result: rate, gain, number of plans, and date."""
    count, when = sum(not problem for problem in search.tried.values()), time.strftime("%Y-%m-%d")
    if not is_gain(finalists):
        return f"no plan of {count} tried was faster than the untuned one, {when}"
    best = finalists[0].rate
    gain = "".join(f", {best / one.rate:.2f} times the untuned plan's" for one in finalists if not one.variables)
    return f"{search.shown(best)}{gain}: the best of {count} plans tried, {when}"
