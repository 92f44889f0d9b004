"""How variables and flags become settings, and what is said of bad ones."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, strategies as st

from entrypoint.core.errors import UserError
from entrypoint.core.settings_base import describe_settings, groups_of, read_settings, rules_of
from entrypoint.settings import LaunchSettings, read_launch_settings
from tests.conftest import refusal
from train.settings import TrainSettings, read_train_settings


def test_defaults_need_nothing_set() -> None:
    given_settings = read_launch_settings({}, {})
    assert given_settings.values == LaunchSettings()
    assert given_settings.sources == {}


def test_flag_wins_over_variable_and_both_keep_spelling() -> None:
    environ = {"LAUNCH_THREADS": "3", "LAUNCH_DEVICE": "cpu"}
    settings = read_launch_settings(environ, {"LAUNCH_THREADS": "5"})
    assert settings.values.threads == 5
    assert settings.sources == {"threads": "--threads=5", "device": "LAUNCH_DEVICE=cpu"}


def test_empty_variable_counts_as_unset() -> None:
    assert read_train_settings({"TRAIN_EPOCHS": ""}, {}).values.optim.epochs == TrainSettings().optim.epochs


def test_launcher_and_trainer_share_no_flag() -> None:
    assert not set(groups_of(LaunchSettings)) & set(groups_of(TrainSettings))


def test_every_setting_is_described() -> None:
    for model in (LaunchSettings, TrainSettings):
        assert all(about.description.endswith(".") for about in describe_settings(model))


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        (
            "LAUNCH_BACKEND",
            "ncl",
            "LAUNCH_BACKEND=ncl: no such backend. Did you mean nccl? Use one of: auto, gloo, ccl, ",
        ),
        ("LAUNCH_THREADS", "0", "LAUNCH_THREADS=0: not auto or a whole number from 1 to 4,096."),
        ("LAUNCH_THREADS", "many", "LAUNCH_THREADS=many: not auto or a whole number from 1 to 4,096."),
        ("LAUNCH_OVERSUBSCRIBE", "perhaps", "LAUNCH_OVERSUBSCRIBE=perhaps: not 1 or 0."),
        ("LAUNCH_NPROC", "2", "LAUNCH_NPROC=2: no such variable. Did you mean LAUNCH_NPROC_PER_NODE?"),
        ("launch_threads", "2", "launch_threads=2: no such variable. Did you mean LAUNCH_THREADS?"),
    ],
)
def test_bad_launch_variable_gives_one_line(variable: str, value: str, said: str) -> None:
    assert refusal(read_launch_settings, {variable: value}, {}).startswith(said)


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("TRAIN_EPOCHS", "0", "TRAIN_EPOCHS=0: not a whole number from 1 to 1,000,000."),
        ("TRAIN_EPOCHS", "ten", "TRAIN_EPOCHS=ten: not a whole number from 1"),
        ("TRAIN_LR", "-1", "TRAIN_LR=-1: not auto or a number above 0."),
        ("TRAIN_LR", "nan", "TRAIN_LR=nan: not auto or a number above 0."),
        ("TRAIN_SCHEDULE", "cosin", "TRAIN_SCHEDULE=cosin: no such schedule. Did you mean cosine?"),
        ("TRAIN_BACH_SIZE", "3", "TRAIN_BACH_SIZE=3: no such variable. Did you mean TRAIN_BATCH_SIZE?"),
        ("TRAIN_RUN_NAME", "../x", "TRAIN_RUN_NAME=../x: not a name without slashes"),
        ("TRAIN_RUN_NAME", "x\nentrypoint: error: forged", r"TRAIN_RUN_NAME=x\nentrypoint: error: forged: not a name"),
        ("TRAIN_RUN_NAME", "x\x1b[31m", r"TRAIN_RUN_NAME=x\x1b[31m: not a name without slashes or control"),
        ("TRAIN_MIXUP_ALPHA", "1e308", "TRAIN_MIXUP_ALPHA=1e308: not a number from 0 to 1,000."),
        ("TRAIN_CUTMIX_ALPHA", "1001", "TRAIN_CUTMIX_ALPHA=1001: not a number from 0 to 1,000."),
        (
            "TRAIN_RUN_NAME",
            "latest",
            "TRAIN_RUN_NAME=latest: not a name without slashes or control characters that does not begin with a dot"
            " and is not `latest`.",
        ),
        ("TRAIN_SYNTHETIC_SHAPE", "3x32", "TRAIN_SYNTHETIC_SHAPE=3x32: not channels x height x width"),
    ],
)
def test_bad_train_variable_gives_one_line(variable: str, value: str, said: str) -> None:
    assert refusal(read_train_settings, {variable: value}, {}).startswith(said)


def test_several_bad_variables_give_one_line_each() -> None:
    with pytest.raises(UserError) as error:
        read_train_settings({"TRAIN_EPOCHS": "x", "TRAIN_SEED": "y"}, {})
    assert len(str(error.value).splitlines()) == 2


def test_invalid_flag_is_named_as_flag() -> None:
    assert refusal(read_train_settings, {"TRAIN_EPOCHS": "3"}, {"TRAIN_EPOCHS": "x"}).startswith("--epochs=x: ")


def test_kubernetes_service_links_are_ignored() -> None:
    links = {"TRAIN_SERVICE_HOST": "10.0.0.1", "TRAIN_PORT_80_TCP_ADDR": "10.0.0.1", "TRAIN_PORT": "tcp://10.0.0.1:80"}
    assert read_train_settings(links | {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, {}).values == TrainSettings()
    with pytest.raises(UserError, match="TRAIN_PORT="):
        read_train_settings(links, {})


@given(st.sampled_from(sorted(groups_of(TrainSettings))), st.text(max_size=300))
def test_any_variable_value_is_parsed_or_raises(field: str, value: str) -> None:
    environ = {f"TRAIN_{field.upper()}": value}
    try:
        read_train_settings(environ, {})
    except UserError as error:
        assert str(error).isprintable()
        assert len(str(error)) < 600


@pytest.mark.parametrize("model", [LaunchSettings, TrainSettings])
def test_setting_that_another_one_needs_exists(model: type[LaunchSettings] | type[TrainSettings]) -> None:
    rules = rules_of(model)
    assert any(one.basic for one in rules.values())
    names = {re.split("!?=", one.needs)[0] for one in rules.values() if one.needs}
    assert names <= set(groups_of(model))


@pytest.mark.parametrize("name", ["TRAIN_HUB_TOKEN", "TRAIN_API_KEY", "TRAIN_APIKEY", "train_password"])
def test_value_of_a_secret_is_not_printed(name: str) -> None:
    message = refusal(read_train_settings, {name: "s3cr3t"}, {})
    assert "s3cr3t" not in message
    assert f"{name}=(hidden): no such variable." in message


def test_password_in_a_url_is_not_shown_where_the_name_is_wrong() -> None:
    refusal(
        read_train_settings,
        {"TRAIN_OUTPUT_DIRS": "s3://me:s3cr3t@bucket/runs"},
        {},
        match=r"^TRAIN_OUTPUT_DIRS=\(hidden\): no such variable",
    )


PATHS = [
    (LaunchSettings, ("log_dir", "secret_file", "python", "tuning_store", "hosts")),
    (TrainSettings, ("cache_dir", "model_path", "weights", "resume", "evaluate")),
]


@pytest.mark.parametrize(("model", "name"), [(model, name) for model, names in PATHS for name in names])
def test_path_takes_the_home_and_no_url(model: type[LaunchSettings] | type[TrainSettings], name: str) -> None:
    variable = f"{model.PREFIX}{name.upper()}"
    settings = read_settings(model, {"HOME": "/home/me", variable: "~/there"}, {})
    assert str(settings.values.value(name)) == settings.texts[name] == "/home/me/there"
    assert settings.sources == {name: f"{variable}=~/there"}
    for url in ("s3://bucket/x", "file:///x", "HTTPS://x.y/z"):
        refusal(read_settings, model, {variable: url}, {}, match=f"^{variable}={url}: is a URL, and a path is needed")


@pytest.mark.parametrize(
    ("variable", "value", "problem"),
    [
        ("TRAIN_EPOCHS", '"5"', "the quotes are part of the value"),
        ("TRAIN_OUTPUT_DIR", "'runs'", "the quotes are part of the value"),
        ("TRAIN_OUTPUT_DIR", "runs\r", "begins or ends with a blank or a line break"),
        ("TRAIN_RUN_NAME", "a ", "begins or ends with a blank or a line break"),
        ("TRAIN_MODEL", "cnn\r", "begins or ends with a blank or a line break"),
    ],
)
def test_what_an_env_file_leaves_in_a_value_is_named(variable: str, value: str, problem: str) -> None:
    refusal(read_train_settings, {variable: value}, {}, match=f"^{variable}=.*: {problem}")


@pytest.mark.parametrize(("name", "length"), [("x" * 201, 201), ("\u65e5" * 90, 270)])
def test_run_name_longer_than_a_folders_is_named(name: str, length: int) -> None:
    refusal(
        read_train_settings,
        {"TRAIN_RUN_NAME": name},
        {},
        match=f"^TRAIN_RUN_NAME=.*: is {length} bytes long, and a folder's name has at most 200",
    )
    assert read_train_settings({"TRAIN_RUN_NAME": "\u65e5" * 66}, {}).values.run.run_name
