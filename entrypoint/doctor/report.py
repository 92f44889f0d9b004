"""`entrypoint doctor`: the checks of every launch, the plan itself, and checks that must try something."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path

from entrypoint.core.errors import UserError, count_text, one_line, printable
from entrypoint.core.packages import missing_module
from entrypoint.core.process import start_thread
from entrypoint.core.user_dirs import nearest_existing, why_not_writable
from entrypoint.machine.backends import DEFAULT_BACKEND, find_backend_problem, find_compile_problem
from entrypoint.machine.interpreter import PTH_FILE, find_interpreter
from entrypoint.machine.shared_libraries import LIBRARY_PATTERNS
from entrypoint.plan.inputs import PlanInputs
from entrypoint.plan.model import Plan
from entrypoint.plan.preflight import Check, State, preflight_checks

# Packages to import in the program's own interpreter. IPEX raises AttributeError if it does not match torch.
IMPORTS = ("torch", "torchvision", "intel_extension_for_pytorch", "oneccl_bindings_for_pytorch", "nni")
IMPORT_TIMEOUT_S = 120
# Of a check that starts programs, which have limits of their own, and of one that asks the system.
LIMIT_S, ANSWER_S = IMPORT_TIMEOUT_S + 60.0, 20.0
RESULT_PREFIX = "tried: "
TRY_IMPORTS = f"""
import importlib, importlib.util, json, sys
for name in sys.argv[1:]:
    state, seen = "absent", "not installed"
    if importlib.util.find_spec(name):
        try:
            state, seen = "ok", getattr(importlib.import_module(name), "__version__", "imports")
        except BaseException as error:
            state, seen = "failure", f"{{type(error).__name__}}: {{' '.join(str(error).split())[:200]}}"
    print("{RESULT_PREFIX}" + json.dumps([name, state, seen]), flush=True)
"""
STATE_LABELS = {"ok": "ok     ", "absent": "absent ", "warning": "warning", "failure": "FAILURE"}


def run_checks(
    inputs: PlanInputs, build_plan: Callable[[], Plan], folders: Sequence[tuple[str, Path]]
) -> tuple[Check, ...]:
    """Return every check; `build_plan` makes the plan, and `folders` are the output folders with their settings."""
    fast = preflight_checks(inputs)
    site = Path(sysconfig.get_path("purelib"))
    checks: Sequence[tuple[str, Callable[[], Iterable[Check]], float]] = (
        ("image", lambda: check_end_of_life(inputs), ANSWER_S),
        ("plan", lambda: check_plan(build_plan, fast), LIMIT_S),
        ("libraries", lambda: check_libraries(inputs), ANSWER_S),
        ("torch.compile", lambda: check_compilers(inputs), LIMIT_S),
        ("oneCCL", lambda: check_oneccl(inputs), LIMIT_S),
        *((name, partial(check_writable, name, folder), ANSWER_S) for name, folder in folders),
        ("installation", lambda: check_installation(inputs.environ, site), ANSWER_S),
        ("imports", lambda: check_imports(inputs.python), LIMIT_S),
    )
    return (*fast, *(seen for name, check, limit_s in checks for seen in within_limit(name, check, limit_s)))


def within_limit(name: str, check: Callable[[], Iterable[Check]], limit_s: float) -> Iterator[Check]:
    """Yield what a check finds; a name server or a mount that does not answer must not hold up the others."""
    made: list[Check] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            made.extend(check())
        except BaseException as error:
            failed.append(error)

    thread = start_thread(run)
    thread.join(limit_s)
    if failed:
        raise failed[0]
    if thread.is_alive():
        yield Check(name, "failure", f"not done after {limit_s:.0f} s", "look for a mount or a server that is gone")
    else:
        yield from made


def check_end_of_life(inputs: PlanInputs) -> Iterator[Check]:
    """Warn of an image whose packages get no more fixes."""
    if ends := inputs.machine.container.image.get("end_of_life"):
        advice = "older recipes run on; take the image cpu, with current torch, for new work and for strangers' files"
        yield Check("end of life", "warning", ends, advice)


def check_plan(build_plan: Callable[[], Plan], fast: Sequence[Check]) -> Iterator[Check]:
    """Make the plan: errors are failures, and warnings that no preflight check has are warnings."""
    if missing_module("train"):
        yield Check("plan", "absent", "the trainer is not installed", "pip install 'reference-training[train]'")
        return
    try:
        plan = build_plan()
    except UserError as error:
        yield from (Check("plan", "failure", line, "see `entrypoint plan`") for line in str(error).splitlines())
        return
    cores = next((decision.value for decision in plan.decisions if decision.key == "cores"), "of other nodes")
    ranks = count_text(plan.nodes.nproc_per_node, "rank")
    yield Check("plan", "ok", f"{ranks} on {plan.device} by {plan.launcher}, cores {cores}")
    reported = {check.line for check in fast}
    yield from (
        Check("plan", "warning", warning, "see `entrypoint plan`")
        for warning in plan.warnings
        if warning not in reported
    )


def check_libraries(inputs: PlanInputs) -> Iterator[Check]:
    """Check which allocators and OpenMP runtimes can be preloaded; all of them are optional."""
    for name in LIBRARY_PATTERNS:
        library = inputs.machine.library(name)
        yield Check(name, "ok" if library.path else "absent", library.path or library.why)


def check_compilers(inputs: PlanInputs) -> Iterator[Check]:
    """Check the default backend of torch.compile."""
    device = "cuda" if inputs.machine.gpus else "cpu"
    versions = inputs.machine.packages.versions
    if "torch" not in versions:
        yield Check("torch.compile", "absent", "no torch in this environment")
        return
    problem = find_compile_problem(DEFAULT_BACKEND, device, versions, inputs.python)
    state: State = "warning" if problem else "ok"
    yield Check("torch.compile", state, problem or "usable", "TRAIN_COMPILE will be refused" if problem else "")


def check_oneccl(inputs: PlanInputs) -> Iterator[Check]:
    """Check oneCCL by a collective of two processes, if its bindings are installed."""
    if not inputs.machine.oneccl.folder or inputs.settings.values.backend == "ccl":  # then the plan tries it
        return
    problem = find_backend_problem("ccl", inputs.python, inputs.machine.oneccl, inputs.environ)
    state: State = "warning" if problem else "ok"
    advice = "LAUNCH_BACKEND=ccl will be refused" if problem else ""
    yield Check("oneCCL", state, problem or "two processes added a number up", advice)


def check_writable(name: str, folder: Path) -> Iterator[Check]:
    """Check whether a folder, or its nearest existing parent, is writable."""
    if not why_not_writable(folder):
        free = shutil.disk_usage(nearest_existing(folder)).free
        yield Check(name, "ok", f"{one_line(folder)} can be written to, {free / 2**30:,.1f} GiB free")
        return
    advice = f"bind a folder there, or set {name} to another"
    yield Check(name, "failure", f"{one_line(folder)} cannot be written to", advice)


def check_installation(environ: Mapping[str, str], site: Path) -> Iterator[Check]:
    """Warn of what may mislead: names of others, another active environment, a missing file.

    `site` is the folder with this environment's packages.
    """
    for name in ("entrypoint", "train"):
        if other := PathFinder.find_spec(name, [str(site)]):
            where = printable(other.origin or site)
            yield Check(
                f"package {name}", "warning", f"another one is installed ({where})", "this program uses its own"
            )
    interpreter = find_interpreter("", "", environ)
    if interpreter.path != sys.executable:
        seen = f"scripts run by {printable(interpreter.path)}, {interpreter.reason}; this program is in {sys.prefix}"
        yield Check("interpreter", "warning", seen, "LAUNCH_PYTHON names another one")
    if not (site / PTH_FILE).exists():
        seen = f"not in {site}; without it ranks of some torch versions abort at their end"
        yield Check(PTH_FILE, "warning", seen, "install the wheel")


def check_imports(python: str) -> Iterator[Check]:
    """Import the installed packages in the program's own interpreter; yield a check per package."""
    try:
        done = subprocess.run(
            [python, "-I", "-c", TRY_IMPORTS, *IMPORTS],
            capture_output=True,
            text=True,
            timeout=IMPORT_TIMEOUT_S,
            check=False,
        )
        output, end = done.stdout, f"the interpreter ended with code {done.returncode}"
    except subprocess.TimeoutExpired as error:
        output, end = (error.stdout or b"").decode(), f"not done after {IMPORT_TIMEOUT_S} s"
    result_lines = (line.removeprefix(RESULT_PREFIX) for line in output.splitlines() if line.startswith(RESULT_PREFIX))
    reported = {name: (state, seen) for name, state, seen in (json.loads(line) for line in result_lines)}
    for name in IMPORTS:
        state, seen = reported.get(name, ("failure", end))
        yield Check(f"import {name}", state, seen, "" if state in ("ok", "absent") else "repair or remove the package")
        if name not in reported:  # the interpreter exited, so it did not try the next packages
            return


def format_report(checks: Sequence[Check], *, as_json: bool) -> str:
    """Return the checks as a table, or as JSON: a list of what, state, seen, advice."""
    if as_json:
        fields = ("what", "state", "seen", "advice")
        return json.dumps([{name: getattr(check, name) for name in fields} for check in checks], indent=2)
    width = max(len(check.what) for check in checks)
    return "\n".join(
        f"{STATE_LABELS[check.state]}  {check.what:<{width}}  {check.seen}"
        + (f"; {check.advice}" if check.advice else "")
        for check in checks
    )
