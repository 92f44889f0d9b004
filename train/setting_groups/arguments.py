"""Values of arguments that a setting passes on: `drop_path_rate=0.1 betas=0.9,0.95`."""

from __future__ import annotations

import re
from collections.abc import Mapping

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
WORDS: Mapping[str, bool | None] = {"true": True, "false": False, "none": None}

Argument = float | int | bool | str | tuple[float, ...] | None


def parse_argument(text: str) -> Argument:
    """Return a value: a number, several with commas, true, false or none, or else the text itself."""
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    parts = text.split(",")
    if not all(NUMBER.fullmatch(part) for part in parts):
        return text
    numbers = tuple(int(part) if re.fullmatch(r"[+-]?\d+", part) else float(part) for part in parts)
    return numbers if len(numbers) > 1 else numbers[0]
