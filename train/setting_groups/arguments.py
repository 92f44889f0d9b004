"""Values of arguments that a setting passes on: `drop_path_rate=0.1 betas=0.9,0.95`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from entrypoint.core.errors import UserError, did_you_mean, printable, refuse_if

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


def parse_class_weights(text: str, classes: Sequence[str]) -> list[float]:
    """Return the weight of each class, 1 where none is named; raises `UserError` for another name, or one twice."""
    weights, source = dict.fromkeys(classes, 1.0), f"TRAIN_CLASS_WEIGHTS={printable(text)}"
    parts = [part.rpartition("=") for part in text.split(",")]
    for name, _, number in parts:
        hint = did_you_mean(name, list(classes)) if name not in weights else ""
        fits = NUMBER.fullmatch(number) and (1e-6 <= float(number) <= 1e6 or float(number) == 0)
        refuse_if(
            {
                f"{source}: there is no class {printable(name or number)}. {hint}Write auto, or class=weight.": (
                    name not in weights
                ),
                f"{source}: {printable(name)} is there twice. Leave one out.": (
                    sum(other == name for other, _, _ in parts) > 1
                ),
                f"{source}: {printable(number)} is no weight. Write 0, or from 1e-6 to 1e6.": not fits,
            }
        )
        weights[name] = float(number)
    if not any(weights.values()):
        raise UserError(f"{source}: every weight is 0, so nothing is learned. Leave a class out of it.")
    return list(weights.values())
