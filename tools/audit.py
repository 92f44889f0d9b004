"""Lists known holes of the locked packages: `make audit`.

pip-audit asks OSV for every lock of containers/. Holes that tools/audit_allowed.toml names, with a reason, are listed
and pass. Exit codes: 0 no new hole, 1 a new one, 3 the service cannot be reached or does not know a package.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ALLOWED = ROOT / "tools/audit_allowed.toml"
OSV_URL = "https://api.osv.dev/v1/query"
CLEAN, HOLES, NOT_DONE = 0, 1, 3


@dataclass(frozen=True)
class Hole:
    """A known hole of a locked package, with the names that databases give it."""

    lock: str
    package: str
    version: str
    names: tuple[str, ...]
    fixed_in: tuple[str, ...]

    @property
    def line(self) -> str:
        """The hole in one line."""
        fixed = f"fixed in {', '.join(self.fixed_in)}" if self.fixed_in else "no fixed version"
        return f"{self.lock}: {self.package} {self.version}: {', '.join(self.names)}, {fixed}"


class NotDone(Exception):
    """A lock that could not be audited, and why."""


def audit(lock: Path, osv_url: str) -> list[Hole]:
    """Return the known holes of a lock's packages; raises `NotDone` unless every one of them was looked up."""
    command = [sys.executable, "-m", "pip_audit", "--requirement", str(lock), "--disable-pip", "--format=json"]
    command += ["--vulnerability-service=osv", f"--osv-url={osv_url}", "--progress-spinner=off", "--timeout=15"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    name = str(lock.relative_to(ROOT)) if lock.is_relative_to(ROOT) else lock.name
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except ValueError:
        last = (done.stderr.strip() or "no output").splitlines()[-1]
        raise NotDone(f"{name}: pip-audit has no answer of {osv_url}: {last[-200:]}") from None
    if skipped := [each["name"] for each in packages if "skip_reason" in each]:
        raise NotDone(f"{name}: not looked up: {', '.join(skipped)}")
    return [
        Hole(name, each["name"], each["version"], (hole["id"], *sorted(hole["aliases"])), tuple(hole["fix_versions"]))
        for each in packages
        for hole in each["vulns"]
    ]


def allowed_holes(file: Path) -> dict[tuple[str, str], str]:
    """Return the reason of each allowed hole, by package and name of the hole."""
    entries = tomllib.loads(file.read_text()).get("allowed", [])
    return {(entry["package"], entry["id"]): entry["reason"] for entry in entries}


def report(holes: Iterable[Hole], allowed: dict[tuple[str, str], str]) -> int:
    """Print every hole, allowed ones with their reason, and entries that no hole needs; return the exit code."""
    new, used = 0, set()
    for hole in holes:
        keys = [(hole.package, name) for name in hole.names if (hole.package, name) in allowed]
        used.update(keys)
        new += not keys
        print(f"allowed: {hole.line}: {allowed[keys[0]]}" if keys else f"HOLE: {hole.line}")
    for package, name in sorted(set(allowed) - used):
        print(f"no longer found: {package}: {name}. Remove it from {ALLOWED.name}.")
    print(f"audit: {new} new, {len(used)} allowed")
    return HOLES if new else CLEAN


def main(words: list[str] | None = None) -> int:
    """Audit the locks that are named, by default all."""
    parser = argparse.ArgumentParser(description="Lists known holes of the locked packages.")
    parser.add_argument("locks", nargs="*", type=Path)
    parser.add_argument("--osv-url", default=OSV_URL)
    parser.add_argument("--allowed", type=Path, default=ALLOWED)
    chosen = parser.parse_args(words)
    locked = (path for path in (ROOT / "containers").rglob("*.txt") if "--hash=" in path.read_text())
    # torch-cpu.txt has the versions of torch-pypi.txt, but not each with a hash.
    locks = chosen.locks or sorted(path for path in locked if path.name != "torch-cpu.txt")
    try:
        holes = [hole for lock in locks for hole in audit(lock, chosen.osv_url)]
    except NotDone as error:
        print(f"audit: not done: {error}", file=sys.stderr)
        return NOT_DONE
    return report(holes, allowed_holes(chosen.allowed))


if __name__ == "__main__":
    sys.exit(main())
