"""Runs in object storage: what the trainer uploads, says and keeps, over starts on different machines."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from entrypoint.core.errors import ExitCode
from tests.conftest import PYTHON, Entrypoint, needs_two_cores
from tests.train.given import TWO_RANKS
from tests.train.object_storage import gateway, s3_server
from tests.train.started import Started

# Long enough to be stopped in the middle on any machine.
LONG = {
    "TRAIN_DATASET": "digits", "TRAIN_RUN_NAME": "a", "TRAIN_RESUME": "auto", "TRAIN_PROGRESS": "plain",
    "TRAIN_TENSORBOARD": "0", "LAUNCH_QUIET": "1", "TRAIN_EPOCHS": "400",
}  # fmt: skip
SHORT = LONG | {"TRAIN_EPOCHS": "2"}
pytestmark = pytest.mark.launch


@pytest.fixture
def bucket(tmp_path: Path) -> dict[str, str]:
    """Settings of a storage that is a folder."""
    return {"TRAIN_OUTPUT_DIR": f"file://{tmp_path}/bucket"}


@pytest.fixture
def s3() -> Iterator[dict[str, str]]:
    """Settings of a storage that is a bucket of a real S3 server."""
    with s3_server("bucket"):
        yield {"TRAIN_OUTPUT_DIR": "s3://bucket/runs", **{k: v for k, v in os.environ.items() if k.startswith("AWS_")}}


def on(machine: str, entrypoint: Entrypoint) -> dict[str, str]:
    """Variables of a machine with a cache folder of its own."""
    return {"XDG_CACHE_HOME": str(entrypoint.folder / machine)}


def weights(entrypoint: Entrypoint, folder: str) -> str:
    (summary,) = entrypoint.folder.glob(f"{folder}/a/summary.json")
    return str(json.loads(summary.read_text())["weights_sha256"])


@needs_two_cores
@pytest.mark.slow_except("file")
@pytest.mark.parametrize("storage", ["file", "s3"])
def test_stop_and_kill_on_other_machines_give_the_same_bits(
    storage: str, entrypoint: Entrypoint, request: pytest.FixtureRequest
) -> None:
    env = {**LONG, **TWO_RANKS, **request.getfixturevalue({"file": "bucket", "s3": "s3"}[storage])}
    env["TRAIN_EPOCHS"] = "12"
    url = env["TRAIN_OUTPUT_DIR"]
    first = Started(entrypoint, {**env, **on("first", entrypoint)})
    first.wait_for("epoch 2/12  train loss")
    first.process.send_signal(signal.SIGTERM)
    code, _, err = first.ended()
    assert (code, f"is saved in {url}/a/checkpoint. Run it again" in err) == (ExitCode.PREEMPTED, True), err
    second = Started(entrypoint, {**env, **on("second", entrypoint)}, "setsid")
    second.wait_for("resuming from")
    second.wait_for("epoch 8/12  train loss")
    os.killpg(second.process.pid, signal.SIGKILL)
    second.process.communicate()
    done = entrypoint("train", env={**env, **on("third", entrypoint)})
    assert (done.code, "resuming from" in done.out) == (0, True), done.err
    assert done.out.splitlines()[-1] == f"uploaded to    {url}/a"
    entrypoint.succeed("train", env={**env, "TRAIN_OUTPUT_DIR": "runs", "TRAIN_RESUME": "off"})
    assert weights(entrypoint, "third/reference-training/runs/*") == weights(entrypoint, "runs")
    entrypoint.succeed("evaluate", f"{url}/a", env={**env, **on("fourth", entrypoint), "TRAIN_OUTPUT_DIR": ""})


def test_run_that_another_process_owns_now_ends(entrypoint: Entrypoint, bucket: dict[str, str]) -> None:
    first = Started(entrypoint, {**LONG, **bucket, **on("first", entrypoint)})
    first.wait_for("epoch 3/400  train loss")
    second = Started(entrypoint, {**LONG, **bucket, **on("second", entrypoint)})
    second.wait_for("train loss")
    code, _, err = first.ended()
    assert (code, "another run owns this folder now" in err) == (ExitCode.USAGE, True), err
    second.process.send_signal(signal.SIGTERM)
    assert second.ended()[0] == ExitCode.PREEMPTED


def test_second_process_on_this_machine_is_refused(entrypoint: Entrypoint, bucket: dict[str, str]) -> None:
    first = Started(entrypoint, {**LONG, **bucket})
    first.wait_for("epoch 3/400  train loss")
    refused = entrypoint("train", env={**LONG, **bucket})
    assert (refused.code, "is training in this folder" in refused.err) == (ExitCode.USAGE, True), refused.err
    first.wait_for("epoch")
    first.process.send_signal(signal.SIGTERM)
    assert first.ended()[0] == ExitCode.PREEMPTED, "it still owns its run"


def test_storage_that_goes_away_costs_no_run(entrypoint: Entrypoint, bucket: dict[str, str]) -> None:
    run = Started(entrypoint, {**LONG, **bucket, "TRAIN_EPOCHS": "12"})
    run.wait_for("epoch 1/12  train loss")
    place = Path(bucket["TRAIN_OUTPUT_DIR"].removeprefix("file://"))
    while True:
        shutil.rmtree(place, ignore_errors=True)
        try:
            place.touch(exist_ok=False)
            break
        except FileExistsError:
            continue
    code, _, err = run.ended()
    assert (code, err.count("Training goes on.")) == (ExitCode.MACHINE, 1), err
    (line,) = [line for line in err.splitlines() if "What is missing there is in" in line]
    assert Path(line.rpartition("there is in ")[2].split(" alone")[0], "model.safetensors").exists()


def test_upload_that_outlasts_the_grace_period_is_said(entrypoint: Entrypoint) -> None:
    env = {**LONG, "TRAIN_OUTPUT_DIR": "s3://bucket/runs", "LAUNCH_GRACE_PERIOD_S": "8"}
    with s3_server("bucket") as address, gateway(address, lambda method, *_: "slow" if method == "PUT" else "") as slow:
        slow.fault = lambda *_: ""
        run = Started(entrypoint, {**env, **{name: os.environ[name] for name in os.environ if name.startswith("AWS_")}})
        run.wait_for("epoch 2/400  train loss")
        slow.fault = lambda method, *_: "slow" if method == "PUT" else ""
        run.wait_for("train loss")
        run.process.send_signal(signal.SIGTERM)
        code, _, err = run.ended(25)
    assert (code, "/a/checkpoint alone (" in err, "the time was too short" in err) == (
        ExitCode.PREEMPTED,
        True,
        True,
    ), err
    assert "killed" not in err


def test_resume_of_a_folder_needs_a_name_in_storage(entrypoint: Entrypoint, bucket: dict[str, str]) -> None:
    entrypoint.succeed("train", env={**SHORT, "TRAIN_RESUME": "off", "TRAIN_OUTPUT_DIR": "runs"})
    env = {**SHORT, **bucket, "TRAIN_RESUME": "runs/a", "TRAIN_EPOCHS": "3", "TRAIN_RUN_NAME": ""}
    refused = entrypoint("plan", "train", env=env)
    assert (refused.code, "TRAIN_RESUME=runs/a: set TRAIN_RUN_NAME too" in refused.err) == (ExitCode.USAGE, True)
    named = entrypoint("train", env={**env, "TRAIN_RUN_NAME": "b"})
    assert (named.code, "resuming from" in named.out) == (0, True), named.err
    assert entrypoint("evaluate", f"{bucket['TRAIN_OUTPUT_DIR']}/b").code == 0


def test_run_without_checkpoints_is_not_resumed(entrypoint: Entrypoint, bucket: dict[str, str]) -> None:
    """`latest` names it, and the next run without a name is a new one, which is uploaded too."""
    env = {**SHORT, **bucket, "TRAIN_RUN_NAME": ""}
    for machine, every in (("first", "0"), ("second", "1")):
        entrypoint.succeed("train", env={**env, **on(machine, entrypoint), "TRAIN_CHECKPOINT_EVERY": every})
    listed = entrypoint("runs", bucket["TRAIN_OUTPUT_DIR"])
    assert [line.split()[1] for line in listed.out.splitlines()[1:]] == ["finished", "finished"], listed.err


def test_runs_are_read_from_storage(entrypoint: Entrypoint, bucket: dict[str, str]) -> None:
    url, elsewhere = bucket["TRAIN_OUTPUT_DIR"], on("elsewhere", entrypoint)
    for name in "ab":
        entrypoint.succeed("train", env={**SHORT, **bucket, "TRAIN_RUN_NAME": name, "TRAIN_RESUME": "off"})
    refused = entrypoint("plan", "train", env={**SHORT, **bucket, "TRAIN_RESUME": "off", **elsewhere})
    assert (refused.code, "TRAIN_RUN_NAME=a" in refused.err) == (ExitCode.USAGE, True), "as a local run"
    listed = entrypoint("runs", url, env=elsewhere)
    states = sorted(line.split()[:2] for line in listed.out.splitlines()[1:])
    assert states == [["a", "finished"], ["b", "finished"]], listed.err
    compared = entrypoint("compare", f"{url}/a", f"{url}/b", env=elsewhere)
    assert (compared.code, "test_accuracy" in compared.out) == (0, True), compared.err
    loads = "import sys, reference_training; print(reference_training.load_model(sys.argv[1]).classes)"
    loaded = entrypoint(f"{url}/a", env=elsewhere, command=(PYTHON, "-c", loads))
    assert loaded.out.startswith("('0', '1', "), loaded.err
    missing = entrypoint("evaluate", f"{url}/none", env=elsewhere)
    assert (missing.code, missing.error_lines) == (
        ExitCode.USAGE,
        [f"entrypoint: error: {url}/none: there is no run. Name the folder of one."],
    )


@pytest.mark.parametrize(
    ("env", "problem"),
    [
        ({"TRAIN_OUTPUT_DIR": "s3://me:my/pass@bucket/runs"}, "TRAIN_OUTPUT_DIR=(hidden): has a password in it"),
        ({"TRAIN_OUTPUT_DIR": "nosuch://bucket/runs"}, "Protocol not known: nosuch. Run: pip install"),
        ({"TRAIN_CACHE_DIR": "s3://bucket/cache"}, "is a URL, and a path is needed"),
    ],
)
def test_url_that_cannot_be_used_is_refused_by_the_plan(
    env: dict[str, str], problem: str, entrypoint: Entrypoint
) -> None:
    result = entrypoint("plan", "train", env={**SHORT, **env})
    assert (result.code != 0, len(result.error_lines)) == (True, 1), result.err
    assert problem in result.err
    assert "my/pass" not in result.out + result.err
