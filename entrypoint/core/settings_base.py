"""Variables and command-line flags become validated settings, each with its source."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from entrypoint.core.errors import UserError, did_you_mean, printable, value_to_show
from entrypoint.core.setting_types import (
    URL,
    SettingRules,
    expected_text,
    find_text_problem,
    metas_of,
    parse_value,
    strip_meta,
    takes_paths,
    union_members,
    value_text,
    with_home,
)

# A Kubernetes service called `train` puts these into every pod of its namespace.
# https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables
SERVICE_LINK = re.compile(r"_(SERVICE_(HOST|PORT)(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)$")

Auto = Literal["auto"]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the groups of settings.

    The modules of such groups do without `from __future__ import annotations`: each start would compile the texts.
    """

    PREFIX: ClassVar[str] = ""
    # Fields that are the trainer's settings: their variables begin as its do.
    OF_TRAINER: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def variable(cls, name: str) -> str:
        """Return the environment variable of a field: `threads` gives `LAUNCH_THREADS`."""
        return variable_name("TRAIN_" if name in cls.OF_TRAINER else cls.PREFIX, name)

    def to_json(self) -> dict[str, Any]:
        """Return the values of all settings as JSON types."""
        return {name: msgspec.to_builtins(self.value(name), enc_hook=str) for name in groups_of(type(self))}

    def value(self, name: str) -> Any:
        """Return the value of a setting, in whichever group it is."""
        group = groups_of(type(self))[name]
        return getattr(getattr(self, group) if group else self, name)

    def with_values(self, **values: Any) -> Self:
        """Return the settings with other values, by setting."""
        settings, groups = self, groups_of(type(self))
        for name, value in values.items():
            group = groups[name]
            nested = replace(getattr(settings, group), **{name: value}) if group else value
            settings = replace(settings, **{group or name: nested})
        return settings


SettingsT = TypeVar("SettingsT", bound=Settings)


@cache
def groups_of(model: type[Settings]) -> dict[str, str]:
    """Return the nested group of each setting, empty for one that `model` has itself, in the order of declaration."""
    groups: dict[str, str] = {}
    for name, annotation in get_type_hints(model).items():
        if name in model.__struct_fields__:
            nested = getattr(annotation, "__struct_fields__", ())
            groups |= dict.fromkeys(nested, name) if nested else {name: ""}
    return groups


class ParsedSettings(Struct, Generic[SettingsT], frozen=True):
    """Validated settings with the source of each field that the user set.

    `sources` holds how the user wrote a field (`TRAIN_EPOCHS=3`), `texts` its value.
    """

    values: SettingsT
    sources: Mapping[str, str]
    texts: Mapping[str, str] = field(default_factory=dict)

    def url(self, name: str) -> str:
        """Return the text of a field that the user set to a URL, else an empty text."""
        return text if URL.match(text := self.texts.get(name, "")) else ""

    def as_variables(self, *, flags_only: bool = False) -> dict[str, str]:
        """Return the user's fields as environment variables in order of name, or only those given as flags."""
        return {
            self.values.variable(name): self.texts[name]
            for name, source in sorted(self.sources.items())
            if source.startswith("--") or not flags_only
        }


class SettingField(Struct, frozen=True):
    """One setting for help and documentation: `choices` are its literal values, `accepts_other` allows more."""

    name: str
    flag: str
    variable: str
    default: str
    description: str
    choices: tuple[str, ...]
    accepts_other: bool
    is_boolean: bool
    expected: str
    is_basic: bool


def variable_name(prefix: str, name: str) -> str:
    """Return the environment variable of a field: `LAUNCH_` and `threads` give `LAUNCH_THREADS`."""
    return prefix + name.upper().rstrip("_")


def flag_name(name: str) -> str:
    """Return the command-line flag of a field: `nproc_per_node` gives `--nproc-per-node`."""
    return "--" + name.rstrip("_").replace("_", "-")


def read_settings(
    model: type[SettingsT], environ: Mapping[str, str], flags: Mapping[str, str]
) -> ParsedSettings[SettingsT]:
    """Validate the variables of `model` and the flags (by variable), which win.

    An empty variable counts as unset, because compose files pass unset variables as empty ones.
    Raises `UserError` with one line for each unknown variable or bad value.
    """
    check_unknown_variables(model, environ)
    written = collect_sources(model, environ, flags)
    values, texts, errors = {}, {}, []
    for name, source in written.items():
        (key, text), annotation = source.split("=", 1), annotations_of(model)[name]
        if problem := find_text_problem(text, annotation):
            errors.append(f"{key}={printable(value_to_show(key, text))}: {problem}")
            continue
        if takes_paths(annotation):
            text = with_home(text, environ.get("HOME", ""))
        try:
            values[name], texts[name] = parse_value(text, annotation), text
        except ValueError:
            errors.append(explain_bad_value(model, name, source))
    if errors:
        raise UserError("\n".join(errors))
    return ParsedSettings(model().with_values(**values), written, texts)


def collect_sources(model: type[Settings], environ: Mapping[str, str], flags: Mapping[str, str]) -> dict[str, str]:
    """Return how the user wrote each field; a flag wins over its variable."""
    written: dict[str, str] = {}
    for name in groups_of(model):
        variable = model.variable(name)
        if variable in flags:
            written[name] = f"{flag_name(name)}={flags[variable]}"
        elif text := environ.get(variable, ""):
            written[name] = f"{variable}={text}"
    return written


def check_unknown_variables(model: type[Settings], environ: Mapping[str, str]) -> None:
    """Raise `UserError` for every variable with the prefix of `model`, in any case, that is not a setting."""
    prefix = model.PREFIX
    current = list(map(model.variable, groups_of(model)))
    in_kubernetes = "KUBERNETES_SERVICE_HOST" in environ
    unknown = [
        name
        for name in environ
        if name.upper().startswith(prefix) and name not in current and not (in_kubernetes and SERVICE_LINK.search(name))
    ]
    if unknown:
        raise UserError(
            "\n".join(
                f"{name}={printable(value_to_show(name, environ[name]))}: no such variable."
                f" {did_you_mean(name.upper(), current)}"
                "`entrypoint --help-all` lists all variables."
                for name in sorted(unknown)
            )
        )


@cache
def annotations_of(model: type[Settings]) -> dict[str, Any]:
    """Return the resolved annotation of each field."""
    hints = get_type_hints(model, include_extras=True)
    return {
        name: get_type_hints(hints[group], include_extras=True)[name] if group else hints[name]
        for name, group in groups_of(model).items()
    }


@cache
def rules_of(model: type[Settings]) -> dict[str, SettingRules]:
    """Return the rules of each field."""
    metas = {name: metas_of(annotation) for name, annotation in annotations_of(model).items()}
    return {name: next(meta.extra["rules"] for meta in found if meta.extra) for name, found in metas.items()}


def describe_field(model: type[Settings], name: str) -> SettingField:
    """Return what help and documentation say about a field."""
    annotation = annotations_of(model)[name]
    members = union_members(annotation)
    choices = tuple(value for one in members if get_origin(one) is Literal for value in get_args(one))
    others = [one for one in members if get_origin(one) is not Literal and one is not type(None)]
    description = next((meta.description for meta in metas_of(annotation) if meta.description), "")
    expected = " or ".join([*choices, *map(expected_text, others)])
    return SettingField(
        name=name,
        flag=flag_name(name),
        variable=model.variable(name),
        default=value_text(model().value(name)),
        description=description,
        choices=choices,
        accepts_other=bool(others),
        is_boolean=bool in map(strip_meta, others),
        expected=expected,
        is_basic=rules_of(model)[name].basic,
    )


@cache
def describe_settings(model: type[Settings]) -> tuple[SettingField, ...]:
    """Return every field in the order of its declaration."""
    return tuple(describe_field(model, name) for name in groups_of(model))


def explain_bad_value(model: type[Settings], name: str, source: str) -> str:
    """Return the line for a bad value: how it was written, what is wrong, what is accepted."""
    about = describe_field(model, name)
    written, value = source.split("=", 1)
    if about.choices and not about.accepts_other:
        hint = did_you_mean(value, about.choices)
        return (
            f"{written}={printable(value)}: no such {name.rstrip('_').replace('_', ' ')}. {hint}"
            f"Use one of: {', '.join(about.choices)}."
        )
    return f"{written}={printable(value)}: not {about.expected}. {about.description}"
