"""How our variables and flags become validated settings: LAUNCH_* and TRAIN_* alike.

pydantic checks the values. pydantic-settings would read the environment too, but its import alone costs
0.05 s of the 0.15 s that the entrypoint may add to a bare python, and it lets misspelt variables pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from entrypoint.errors import Refused, did_you_mean, shown

# A Kubernetes service called `train` puts these into every pod of its namespace; they are not ours.
# https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables
SERVICE_LINK = re.compile(r"_(SERVICE_(HOST|PORT)(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)$")


class Settings(BaseModel):
    """Base of both groups of settings: frozen, and no field that is not declared."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


SettingsT = TypeVar("SettingsT", bound=Settings)


@dataclass(frozen=True)
class Given(Generic[SettingsT]):
    """Validated settings, and for each field that the user gave, how it was written (`TRAIN_EPOCHS=3`)."""

    values: SettingsT
    source: Mapping[str, str]

    def as_variables(self, prefix: str, *, flags_only: bool = False) -> dict[str, str]:
        """Return what the user gave as environment variables, in order of name; or only what came as a flag."""
        return {
            variable_name(prefix, field): text.split("=", 1)[1]
            for field, text in sorted(self.source.items())
            if text.startswith("--") or not flags_only
        }


def variable_name(prefix: str, field: str) -> str:
    """Return the environment variable of a field: `LAUNCH_` and `threads` give `LAUNCH_THREADS`, so does `threads_`.

    The underscore at the end keeps a field from being a word of Python's.
    """
    return prefix + field.upper().rstrip("_")


def flag_name(field: str) -> str:
    """Return the command-line flag of a field: `nproc_per_node` gives `--nproc-per-node`."""
    return "--" + field.rstrip("_").replace("_", "-")


def read_settings(
    model: type[SettingsT], prefix: str, environ: Mapping[str, str], flags: Mapping[str, str]
) -> Given[SettingsT]:
    """Validate the variables that begin with `prefix`, and flags (by field name), which win over them.

    An empty variable counts as unset, since compose files pass unset ones so. Raises `Refused` with one line
    for each unknown variable or bad value.
    """
    refuse_unknown(model, prefix, environ)
    written = {
        field: f"{name}={environ[name]}"
        for field in model.model_fields
        if environ.get(name := variable_name(prefix, field), "") != ""
    } | {field: f"{flag_name(field)}={value}" for field, value in flags.items()}
    try:
        values = model.model_validate({field: text.split("=", 1)[1] for field, text in written.items()})
    except ValidationError as error:
        raise Refused("\n".join(explain(model, written, error))) from None
    return Given(values, written)


def refuse_unknown(model: type[Settings], prefix: str, environ: Mapping[str, str]) -> None:
    """Raise `Refused` for every variable with our prefix, in any case, that is not one of ours."""
    known = [variable_name(prefix, field) for field in model.model_fields]
    in_kubernetes = "KUBERNETES_SERVICE_HOST" in environ
    unknown = [
        name
        for name in environ
        if name.upper().startswith(prefix) and name not in known and not (in_kubernetes and SERVICE_LINK.search(name))
    ]
    if unknown:
        raise Refused(
            "\n".join(
                f"{name}={shown(environ[name])}: no such variable. {did_you_mean(name.upper(), known)}"
                "`entrypoint --help` lists them all."
                for name in sorted(unknown)
            )
        )


def explain(model: type[Settings], written: Mapping[str, str], error: ValidationError) -> Iterator[str]:
    """Yield one line for each field that pydantic refused: what was written, why not, what would do."""
    complaints: dict[str, str] = {}
    for one in error.errors():
        # A union complains once for each member; what it says of the number is more use than of the word.
        field = str(one["loc"][0])
        if field not in complaints or one["type"] != "literal_error":
            complaints[field] = str(one["msg"])
    for field, complaint in complaints.items():
        name, value = written[field].split("=", 1)
        info = model.model_fields[field]
        choices = words(info.annotation)
        if choices and not numeric(info.annotation):
            hint = did_you_mean(value, choices)
            why = f"no such {field.rstrip('_').replace('_', ' ')}. {hint}One of: {', '.join(choices)}."
        else:
            reason = complaint.removeprefix("Value error, ").removeprefix("Input should be ").split(",")[0]
            also = "".join(f" or {word}" for word in choices)
            why = f"should be {reason}{also}. {info.description}"
        yield f"{name}={shown(value)}: {why}"


def words(annotation: Any) -> tuple[str, ...]:
    """Return the literal words that an annotation allows: those of `Literal["auto"] | int` are ("auto",)."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return tuple(word for part in get_args(annotation) for word in words(part))


def numeric(annotation: Any) -> bool:
    """Tell whether an annotation allows a number or free text beside its literal words."""
    if get_origin(annotation) is Literal:
        return False
    parts = get_args(annotation)
    return any(numeric(part) for part in parts) if parts else annotation is not type(None)


def describe(model: type[Settings], prefix: str) -> Iterator[tuple[str, str, str, FieldInfo]]:
    """Yield (flag, variable, default as text, field) for each setting, for help and for the command line."""
    for field, info in model.model_fields.items():
        default = (
            {True: "1", False: "0", None: "unset"}.get(info.default)
            if (info.default is None or isinstance(info.default, bool))
            else info.default
        )
        yield flag_name(field), variable_name(prefix, field), str(default), info
