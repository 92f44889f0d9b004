"""Backends that are tried out before they are planned."""

from __future__ import annotations

import sys

import pytest

from entrypoint.machine.comm_backends import find_backend_problem


@pytest.mark.parametrize("backend", ["auto", "gloo", "nccl"])
def test_what_every_torch_has_is_not_tried(backend: str) -> None:
    assert find_backend_problem(backend, "/no/such/python") == ""


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ("ccl", "cannot be used (ModuleNotFoundError: No module named 'oneccl_bindings_for_pytorch'); install oneccl"),
        ("mpi", "cannot be used (this torch is built without MPI); use a torch that is built from source with MPI"),
    ],
)
def test_what_is_absent_is_told_with_what_to_install(backend: str, said: str) -> None:
    assert find_backend_problem(backend, sys.executable).startswith(said)
