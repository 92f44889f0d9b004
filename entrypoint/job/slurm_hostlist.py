"""Node lists as Slurm writes them, expanded here: `scontrol show hostnames` is seldom there inside a container."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

from entrypoint.core.errors import UserError, printable

# No cluster has more; a list that says so is a mistake, not work for minutes.
MOST_NODES = 1_000_000
RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
NAME = re.compile(r"[A-Za-z0-9._-]*")


def expand_hostlist(text: str, what: str = "node list") -> tuple[str, ...]:
    """Return the names of a list like `node[01-03,7],gpu-[1-2]-ib[0,3],login`, in its order (slurm.conf(5)).

    Raises `UserError` with `what` and the position (from 1) where the list cannot be read.
    """
    names: list[str] = []
    at = 0
    while True:
        parts, at = parse_pattern(text, at, what)
        count = 1
        for part in parts:
            count *= len(part)
        if len(names) + count > MOST_NODES:
            raise parse_error(what, text, at, f"more than {MOST_NODES:,} nodes")
        names += map("".join, product(*parts))
        if at == len(text):
            return tuple(names)
        at += 1  # the comma


def parse_pattern(text: str, at: int, what: str) -> tuple[list[list[str]], int]:
    """Read one pattern from a position; return its parts, each the texts that it stands for, and where it ends."""
    parts: list[list[str]] = []
    start = at
    while at < len(text) and text[at] != ",":
        if text[at] == "[":
            part, at = parse_brackets(text, at, what)
        else:
            name = NAME.match(text, at)
            if not name or name.end() == at:
                raise parse_error(what, text, at, f"{printable(text[at])} is no part of a name")
            part, at = [name[0]], name.end()
        parts.append(part)
    if at == start:
        raise parse_error(what, text, at, "a name is missing")
    return parts, at


def parse_brackets(text: str, at: int, what: str) -> tuple[list[str], int]:
    """Read `[01-03,7]`; return the numbers as written out, and where it ends."""
    close = text.find("]", at)
    if close < 0:
        raise parse_error(what, text, at, "a bracket is opened and not closed")
    numbers: list[str] = []
    at += 1
    while True:
        match = RANGE.match(text, at, close)
        if not match:
            raise parse_error(what, text, at, "expected a number or a range like 01-03")
        numbers += expand_range(match, text, at, what)
        at = match.end()
        if at == close:
            return numbers, close + 1
        if text[at] != ",":
            raise parse_error(what, text, at, "expected a comma or a closing bracket")
        at += 1


def expand_range(match: re.Match[str], text: str, at: int, what: str) -> Iterator[str]:
    """Return the numbers of `01-03` as wide as its first is written, or the one of `7`."""
    first, last = match[1], match[2] or match[1]
    if len(last) > 18 or len(first) > 18:
        raise parse_error(what, text, at, "the number is too long")
    count = int(last) - int(first) + 1
    if count < 1:
        raise parse_error(what, text, at, f"the range {first}-{last} runs backwards")
    if count > MOST_NODES:
        raise parse_error(what, text, at, f"more than {MOST_NODES:,} nodes")
    return (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))


def parse_error(what: str, text: str, at: int, why: str) -> UserError:
    """Return the refusal of a list, with the position and what stands around it."""
    around = text[max(0, at - 12) : at + 12]
    return UserError(f"{what}: cannot be read at position {at + 1}, near {printable(around)}: {why}")
