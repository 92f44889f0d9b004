"""Convert the text of a setting into the type of its annotation, and describe the accepted values."""

from __future__ import annotations

import math
import re
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta

from entrypoint.core.errors import SECRET_IN_URL


class SettingRules(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a setting besides its type and text.

    `basic` settings are in `--help`; `--help-all` has all. `speed`: it changes the time of a training step.
    `resume`: another value than the checkpoint's is refused unless the user names the run, refused as other data are,
    accepted, refused whatever the user says, or so once it was set.
    `nodes`: whether the nodes of a job may have different values. `evaluate`: an evaluation takes the trained run's
    value, or has its own, or does not use it. `needs` is the setting that switches it on: `prune_ratio`,
    `schedule=step` or `schedule!=constant`.
    """

    basic: bool = False
    speed: bool = True
    resume: Literal["same", "data", "may_change", "must_keep", "set_once"] = "same"
    nodes: Literal["same", "may_differ"] = "same"
    evaluate: Literal["unused", "adopted", "own"] = "unused"
    needs: str = ""


def about(  # noqa: PLR0913  # a keyword for each rule
    description: str,
    *,
    basic: bool = False,
    speed: bool = True,
    resume: Literal["same", "data", "may_change", "must_keep", "set_once"] = "same",
    nodes: Literal["same", "may_differ"] = "same",
    evaluate: Literal["unused", "adopted", "own"] = "unused",
    needs: str = "",
) -> Meta:
    """Return what an annotation says about a setting: its text, and the fields of `SettingRules`."""
    rules = SettingRules(basic=basic, speed=speed, resume=resume, nodes=nodes, evaluate=evaluate, needs=needs)
    return Meta(description=description, extra={"rules": rules})


# Ranges of numbers that several settings share.
Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
BelowOne = Annotated[float, Meta(ge=0, lt=1)]
AboveZero = Annotated[float, Meta(gt=0)]
# Larger ones give the same mix, a half of each image.
Alpha = Annotated[float, Meta(ge=0, le=1000)]
# A path in a text, for settings that also accept words.
PathText = Annotated[str, Meta(title="a path")]
WordOrPath = Annotated[str, Meta(title="a word or a path")]
URL_TITLE = "a path or a URL"
PathOrUrl = Annotated[Path, Meta(title=URL_TITLE)]
URL = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)
BOOLEANS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
WHOLE_NUMBER = re.compile(r"[+-]?\d{1,18}", re.ASCII)


def as_url(path: Path | None) -> str:
    """Return the URL that was made a path, which has one slash for two; an empty text for any other path."""
    match = re.fullmatch(r"([a-z][a-z0-9+.-]+):/(.+)", str(path), re.IGNORECASE | re.DOTALL)
    return f"{match[1]}:{'///' if match[1] == 'file' else '//'}{match[2]}" if match else ""


def parse_value(text: str, annotation: Any) -> Any:
    """Return text as a value of an annotation; raises ValueError where no member of it accepts the text."""
    for member in union_members(annotation):
        try:
            value = coerce(text, strip_meta(member))
            return msgspec.convert(value, member, dec_hook=lambda kind, raw: kind(raw))
        except ValueError:  # msgspec.ValidationError is one
            continue
    raise ValueError(text)


def takes_paths(annotation: Any) -> bool:
    """Return whether a setting may hold a path."""
    members = union_members(annotation)
    return any(strip_meta(one) is Path or expected_text(one).endswith("a path") for one in members)


def with_home(text: str, home: str) -> str:
    """Return a path with `~` replaced, as a shell does in a word of its own but not behind `=`."""
    return home + text[1:] if home and (text == "~" or text.startswith("~/")) else text


def find_text_problem(text: str, annotation: Any) -> str:
    """Return what makes a text another one than the user means, empty for none: env files keep quotes and line ends."""
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        return "the quotes are part of the value, as in a file for `docker run --env-file`. Leave them out."
    if not text and takes_paths(annotation):
        return "names nothing. Name a path, or leave it out."
    kinds = {strip_meta(member) for member in union_members(annotation)}
    if text != text.strip() and kinds & {str, Path}:
        return "begins or ends with a blank or a line break. Remove it."
    if not takes_paths(annotation) or not URL.match(text):
        return ""
    if not any(expected_text(member) == URL_TITLE for member in union_members(annotation)):
        return (
            "is a URL, and a path is needed. Copy or mount what is there. TRAIN_DATA_DIR=URL reads shards and csv,"
            " TRAIN_DATASET=hf:URL parquet files, and TRAIN_OUTPUT_DIR=URL keeps runs in object storage."
        )
    if SECRET_IN_URL.match(text):
        return "has a password in it, which logs would show. Set the variables of that storage."
    return ""


def coerce(text: str, kind: Any) -> Any:
    """Return text as a plain type; raises ValueError where it is none."""
    if kind is bool and text.lower() in BOOLEANS:
        return BOOLEANS[text.lower()]
    if kind is int and WHOLE_NUMBER.fullmatch(text.strip()):
        return int(text)
    if kind is float and NUMBER.fullmatch(text.strip()) and math.isfinite(float(text)):
        return float(text)
    if kind in (bool, int, float, type(None)):
        raise ValueError(text)
    return Path(text) if kind is Path else text


def union_members(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, each with its own constraints, without the description around it."""
    if get_origin(annotation) is Annotated:
        inner, *metas = get_args(annotation)
        if len(union_members(inner)) > 1:
            return union_members(inner)
        constraints = [meta for meta in metas if meta.description is None]
        return (reduce(lambda kind, meta: Annotated[kind, meta], constraints, inner),)
    if get_origin(annotation) is Literal or not get_args(annotation):
        return (annotation,)
    return tuple(one for member in get_args(annotation) for one in union_members(member))


def strip_meta(annotation: Any) -> Any:
    """Return an annotation without constraints and descriptions."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def metas_of(annotation: Any) -> tuple[Meta, ...]:
    """Return the Meta objects directly around an annotation."""
    return tuple(get_args(annotation)[1:]) if get_origin(annotation) is Annotated else ()


def value_text(value: object) -> str:
    """Return a value as the user would write it; None and an empty text are `unset`."""
    if value is None or value == "":
        return "unset"
    return str(int(value)) if isinstance(value, bool) else str(value)


def expected_text(annotation: Any) -> str:
    """Return which values a member of an annotation accepts: `a whole number from 1 to 4096`."""
    kind, metas = strip_meta(annotation), metas_of(annotation)
    if kind is bool:
        return "1 or 0"
    if kind in (int, float):
        noun = "a whole number" if kind is int else "a number"
        limits = {name: getattr(meta, name) for meta in metas for name in ("ge", "gt", "le", "lt")}
        low, above, high, below = (limits.get(name) for name in ("ge", "gt", "le", "lt"))
        lower = f" from {low:,}" if low is not None else f" above {above:,}" if above is not None else ""
        upper = f" to {high:,}" if high is not None else f" to below {below:,}" if below is not None else ""
        return f"{noun}{lower}{upper if lower else ''}"
    titles = [meta.title for meta in metas if meta.title]
    return titles[0] if titles else "a path" if kind is Path else "text"
