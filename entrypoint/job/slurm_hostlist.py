"""Node lists as Slurm writes them, expanded here: `scontrol show hostnames` is seldom there inside a container."""

from __future__ import annotations

import re
from itertools import product
from math import prod

from entrypoint.core.errors import UserError, printable

# No cluster has more; a list that says so is a mistake, not work for minutes.
MOST_NODES = 1_000_000
# `01-03` or `7`, and one pattern of a list: letters, and lists of such numbers in brackets.
NUMBERS = "[0-9]{1,18}(?:-[0-9]{1,18})?"
PATTERN = rf"(?:[A-Za-z0-9._-]|\[{NUMBERS}(?:,{NUMBERS})*\])+"


def expand_hostlist(text: str, what: str = "node list") -> tuple[str, ...]:
    """Return the names of a list like `node[01-03,7],gpu-[1-2]-ib[0,3],login`, in its order (slurm.conf(5)).

    Raises `UserError` with `what` where the list cannot be read.
    """
    if not re.fullmatch(f"{PATTERN}(?:,{PATTERN})*", text):
        raise UserError(f"{what}={printable(text)}: cannot be read; expected a form like node[01-03,7]")
    names: list[str] = []
    for pattern in re.findall(PATTERN, text):
        parts = [expand_numbers(what, part) for part in re.split(r"[\[\]]", pattern)[1::2]]
        if len(names) + prod(map(len, parts)) > MOST_NODES:
            raise UserError(f"{what}: more than {MOST_NODES:,} nodes")
        form = re.sub(r"\[.*?\]", "{}", pattern)
        names += (form.format(*numbers) for numbers in product(*parts))
    return tuple(names)


def expand_numbers(what: str, text: str) -> list[str]:
    """Return the numbers of `01-03,7`, as wide as the first of each range; raises `UserError`."""
    numbers: list[str] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        count = int(last or first) - int(first) + 1
        if not 0 < count <= MOST_NODES:
            raise UserError(f"{what}: the range {part} runs backwards, or has more than {MOST_NODES:,} nodes")
        numbers += (str(int(first) + index).zfill(len(first)) for index in range(count))
    return numbers
