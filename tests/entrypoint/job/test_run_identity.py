"""What distinguishes a run from others on the same nodes."""

from __future__ import annotations

import pytest

from entrypoint.job.detect import Job
from entrypoint.job.node_group import JOB_TOKEN_VAR
from entrypoint.job.run_identity import PROGRAM, identify_run, train_words, with_run_id
from entrypoint.rank.refusal import run_token


@pytest.mark.parametrize(
    ("job", "environ", "expected"),
    [
        (Job("srun", job_id="7.0"), {}, "7.0"),
        (Job("Open MPI", job_id="1263468545"), {}, "1263468545"),
        (Job("Open MPI", job_id="1263468545"), {JOB_TOKEN_VAR: "node1-17"}, "node1-17"),
    ],
)
def test_identity_is_the_launchers_id_or_our_own(job: Job, environ: dict[str, str], expected: str) -> None:
    assert identify_run(job, environ, ("train",)) == expected


@pytest.mark.parametrize("launcher", [None, "jsrun", "PMI"])
def test_identity_without_an_id_is_what_the_run_computes(launcher: str | None) -> None:
    job = Job(launcher, job_id="7" if launcher else "")  # the batch job's, in which there may be several runs
    first, second = (identify_run(job, {}, ("x.py", "--lr", rate)) for rate in ("0.1", "0.2"))
    assert first.startswith(f"{PROGRAM}x.py --lr 0.1 (")
    assert first != second
    assert first == identify_run(job, {}, ("x.py", "--lr", "0.1"))


def test_identity_is_one_short_printable_line() -> None:
    text = identify_run(Job(), {}, ("x.py", "a\nb\x1b[31m", "\udcff", "x" * 1000))
    assert text.isprintable()
    assert len(text) < 260


def test_identity_of_training_has_settings_of_all_nodes_alone() -> None:
    environ = {"TRAIN_LR": "0.1", "TRAIN_DATA_DIR": "/node1/data", "TRAIN_SEED": ""}
    assert list(train_words(environ, {"TRAIN_MODEL": "resnet18"})) == ["train", "TRAIN_MODEL=resnet18", "TRAIN_LR=0.1"]


def test_port_of_the_user_is_a_run_of_its_own() -> None:
    one, other = (f"{PROGRAM}{name} (0)" for name in ("a", "b"))
    assert run_token(29500, one, derived=False) == run_token(29500, other, derived=False)
    assert run_token(29500, one, derived=True) != run_token(29500, other, derived=True)
    assert run_token(29500, "7.0", derived=False) != run_token(29500, "7.1", derived=False)


def test_only_hydra_is_asked_for_its_id() -> None:
    job = Job("srun", job_id="7.0")
    assert with_run_id(job) is job
    assert with_run_id(Job()) == Job()
