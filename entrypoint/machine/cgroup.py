"""Read the CPU quota and memory limit of this process's cgroup (v1 and v2, all levels up to the root)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from entrypoint.machine.cpu_topology import read_number
from entrypoint.machine.procfs import read_lines

# A v1 group without a limit reports a number near 2^63. Real limits are far below a petabyte.
NO_LIMIT_BYTES = 1 << 50


def read_limits(root: Path) -> tuple[float | None, int | None]:
    """Return the CPUs (fractional) and bytes that all hierarchies in /proc/self/cgroup allow, None if unlimited.

    The tightest level counts. Source: kernel docs, admin-guide/cgroup-v2.rst (cpu.max, memory.max) and cgroup-v1
    (cpu.cfs_quota_us, memory.limit_in_bytes). A container that sees only its own subtree shows its path as `/`.
    """
    folders = list(iter_cgroup_dirs(root))
    cpus = filter(None, (v2_quota(folder) or v1_quota(folder) for folder in folders))
    return min(cpus, default=None), min(filter(None, map(memory_limit, folders)), default=None)


def iter_cgroup_dirs(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's groups, from its own up to each hierarchy's root."""
    mount = root / "sys/fs/cgroup"
    for line in read_lines(root / "proc/self/cgroup") or ["0::/"]:
        if line.count(":") < 2:
            continue
        _, controllers, path = line.split(":", 2)
        if controllers and not {"cpu", "memory"} & set(controllers.split(",")):
            continue
        tops = (
            [mount / controllers, *(mount / name for name in controllers.split(","))]
            if controllers
            else [
                mount,
                mount / "unified",
            ]
        )
        for top in dict.fromkeys(tops):
            if top.is_dir():
                own = top / path.strip("/")
                yield from (own, *(parent for parent in own.parents if parent.is_relative_to(top)))


def memory_limit(folder: Path) -> int | None:
    """Return the bytes that a group may use, None if it has no limit."""
    limit = read_positive_int(folder / "memory.max") or read_positive_int(folder / "memory.limit_in_bytes")
    return limit if limit and limit < NO_LIMIT_BYTES else None


def v2_quota(folder: Path) -> float | None:
    """Return the CPUs that `cpu.max` grants (`150000 100000` is 1.5), None for `max` or no file."""
    try:
        quota, _, period = (folder / "cpu.max").read_text().partition(" ")
        return int(quota) / int(period or 100000)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def v1_quota(folder: Path) -> float | None:
    """Return the CPUs that the CFS quota grants, None for -1 or no file."""
    quota, period = read_positive_int(folder / "cpu.cfs_quota_us"), read_positive_int(folder / "cpu.cfs_period_us")
    return quota / period if quota and period else None


def read_positive_int(path: Path) -> int | None:
    """Return a file's positive number, None if there is none (`max`, -1, no such file)."""
    value = read_number(path)
    return value if value and value > 0 else None
