"""Backends that are tried out before they are planned."""

from __future__ import annotations

import os
import sys

import pytest

from entrypoint.machine.backends import OneCcl, find_backend_problem


@pytest.mark.parametrize("backend", ["auto", "gloo", "nccl"])
def test_find_backend_problem_skips_builtin_backends(backend: str) -> None:
    assert find_backend_problem(backend, "/no/such/python", OneCcl(), {}) == ""


@pytest.mark.launch
@pytest.mark.parametrize(
    ("backend", "said"),
    [
        (
            "ccl",
            "cannot be used (ModuleNotFoundError: No module named 'oneccl_bindings_for_pytorch'); oneccl_bind_pt ended",
        ),
        ("mpi", "cannot be used (this torch is built without MPI); use a torch that is built from source with MPI"),
    ],
)
def test_find_backend_problem_names_missing_package(backend: str, said: str) -> None:
    assert find_backend_problem(backend, sys.executable, OneCcl(), os.environ).startswith(said)
