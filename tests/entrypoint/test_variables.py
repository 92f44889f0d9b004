"""How variables and flags become settings, and what is said of bad ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrypoint.errors import Refused
from entrypoint.settings import LaunchSettings, read_launch_settings
from train.settings import TrainSettings, read_train_settings


def said(error: pytest.ExceptionInfo[Refused]) -> str:
    return str(error.value)


def test_defaults_need_nothing_set() -> None:
    given_settings = read_launch_settings({}, {})
    assert given_settings.values == LaunchSettings()
    assert given_settings.source == {}


def test_a_flag_wins_over_its_variable_and_both_keep_how_they_were_written() -> None:
    environ = {"LAUNCH_THREADS": "3", "LAUNCH_DEVICE": "cpu"}
    settings = read_launch_settings(environ, {"threads": "5"})
    assert settings.values.threads == 5
    assert settings.source == {"threads": "--threads=5", "device": "LAUNCH_DEVICE=cpu"}


def test_an_empty_variable_counts_as_unset() -> None:
    assert read_train_settings({"TRAIN_EPOCHS": ""}, {}).values.epochs == TrainSettings().epochs


def test_launcher_and_trainer_share_no_flag() -> None:
    assert not set(LaunchSettings.model_fields) & set(TrainSettings.model_fields)


def test_every_setting_is_described() -> None:
    for model in (LaunchSettings, TrainSettings):
        assert all(info.description for info in model.model_fields.values())


@pytest.mark.parametrize(
    ("variable", "value", "said_of_it"),
    [
        (
            "LAUNCH_BACKEND",
            "ncl",
            "LAUNCH_BACKEND=ncl: no such backend. Did you mean nccl? One of: auto, gloo, ccl, ",
        ),
        ("LAUNCH_THREADS", "0", "LAUNCH_THREADS=0: should be greater than or equal to 1 or auto."),
        ("LAUNCH_THREADS", "many", "LAUNCH_THREADS=many: should be a valid integer or auto."),
        ("LAUNCH_OVERSUBSCRIBE", "perhaps", "LAUNCH_OVERSUBSCRIBE=perhaps: should be a valid boolean."),
        ("LAUNCH_NPROC", "2", "LAUNCH_NPROC=2: no such variable. Did you mean LAUNCH_NPROC_PER_NODE?"),
        ("launch_threads", "2", "launch_threads=2: no such variable. Did you mean LAUNCH_THREADS?"),
    ],
)
def test_a_bad_launch_variable_is_one_line(variable: str, value: str, said_of_it: str) -> None:
    with pytest.raises(Refused) as error:
        read_launch_settings({variable: value}, {})
    assert said(error).startswith(said_of_it)
    assert len(said(error).splitlines()) == 1
    assert error.value.code == 2


@pytest.mark.parametrize(
    ("variable", "value", "said_of_it"),
    [
        ("TRAIN_EPOCHS", "0", "TRAIN_EPOCHS=0: should be greater than or equal to 1."),
        ("TRAIN_EPOCHS", "ten", "TRAIN_EPOCHS=ten: should be a valid integer."),
        ("TRAIN_LR", "-1", "TRAIN_LR=-1: should be greater than 0 or auto."),
        ("TRAIN_LR", "nan", "TRAIN_LR=nan: should be a finite number or auto."),
        ("TRAIN_OPTIMIZER", "sdg", "TRAIN_OPTIMIZER=sdg: no such optimizer. Did you mean sgd?"),
        ("TRAIN_BACH_SIZE", "3", "TRAIN_BACH_SIZE=3: no such variable. Did you mean TRAIN_BATCH_SIZE?"),
        ("TRAIN_RUN_NAME", "../x", "TRAIN_RUN_NAME=../x: should"),
        ("TRAIN_RUN_NAME", "latest", "TRAIN_RUN_NAME=latest: should be a name that does not begin with a dot"),
        ("TRAIN_SYNTHETIC_SHAPE", "3x32", "TRAIN_SYNTHETIC_SHAPE=3x32: should"),
    ],
)
def test_a_bad_train_variable_is_one_line(variable: str, value: str, said_of_it: str) -> None:
    with pytest.raises(Refused) as error:
        read_train_settings({variable: value}, {})
    assert said(error).startswith(said_of_it)
    assert len(said(error).splitlines()) == 1


def test_several_bad_variables_are_a_line_each() -> None:
    with pytest.raises(Refused) as error:
        read_train_settings({"TRAIN_EPOCHS": "x", "TRAIN_SEED": "y"}, {})
    assert len(said(error).splitlines()) == 2


def test_a_bad_flag_is_told_as_the_flag() -> None:
    with pytest.raises(Refused) as error:
        read_train_settings({"TRAIN_EPOCHS": "3"}, {"epochs": "x"})
    assert said(error).startswith("--epochs=x: ")


def test_kubernetes_service_links_are_not_ours() -> None:
    links = {"TRAIN_SERVICE_HOST": "10.0.0.1", "TRAIN_PORT_80_TCP_ADDR": "10.0.0.1", "TRAIN_PORT": "tcp://10.0.0.1:80"}
    assert read_train_settings(links | {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, {}).values == TrainSettings()
    with pytest.raises(Refused, match="TRAIN_PORT="):
        read_train_settings(links, {})


@given(st.sampled_from(sorted(TrainSettings.model_fields)), st.text(max_size=300))
def test_whatever_a_variable_holds_it_is_read_or_refused(field: str, value: str) -> None:
    environ = {f"TRAIN_{field.upper()}": value}
    try:
        read_train_settings(environ, {})
    except Refused as error:
        assert str(error).isprintable()
        assert len(str(error)) < 600
