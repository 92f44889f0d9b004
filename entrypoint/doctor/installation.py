"""What may mislead in an environment that has the launcher: names of others, another active one, a missing file."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path

from entrypoint.core.errors import printable
from entrypoint.machine.interpreter import PTH_FILE, find_interpreter
from entrypoint.plan.preflight import Check


def check_installation(environ: Mapping[str, str], site: Path) -> Iterator[Check]:
    """Yield warnings; `site` is the folder with this environment's packages."""
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
