"""Backends of communication and of torch.compile, tried out before they are planned."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from entrypoint.machine.backends import (
    OneCcl,
    find_backend_problem,
    find_compile_problem,
    find_ipex_problem,
    find_oneccl,
    transport_variables,
)
from tests.conftest import PYTHON, Entrypoint


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


VERSIONS = {"torch": "2.8.0", "intel_extension_for_pytorch": "2.8.0"}


@pytest.mark.parametrize(("device", "versions", "problem"), [
    ("cpu", {}, ""),
    ("cuda", {"triton": "3.4.0"}, ""),
    ("cuda", {}, "needs triton, which is not installed"),
])  # fmt: skip
def test_find_compile_problem_names_missing_tools(
    device: str, versions: dict[str, str], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("entrypoint.machine.backends.find_noexec_cache", lambda _: "")  # as /tmp in a container
    assert find_compile_problem("inductor", device, versions, PYTHON) == problem


def test_find_compile_problem_names_missing_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    problem = find_compile_problem("inductor", "cpu", {}, PYTHON)
    assert problem == "needs a C++ compiler: install g++ and Python's headers"


@pytest.mark.parametrize(("device", "versions", "problem"), [
    ("cpu", VERSIONS, ""),
    ("cuda", VERSIONS, "is for CPUs"),
    ("cpu", {}, "is not installed"),
    ("cpu", VERSIONS | {"torch": "2.9.1"}, "2.8.0 does not go with torch 2.9.1"),
])  # fmt: skip
def test_find_ipex_problem_names_torch_version(device: str, versions: dict[str, str], problem: str) -> None:
    assert find_ipex_problem(device, versions) == problem


@pytest.mark.slow_except("eager")
@pytest.mark.launch
@pytest.mark.parametrize(("backend", "said"), [
    ("eager", ""),
    pytest.param("aot_eager", "", marks=pytest.mark.slow),
    ("nosuch", "has no such backend, only "),
    ("tvm", "cannot be used ("),
])  # fmt: skip
def test_other_backend_compiles_an_addition_first(backend: str, said: str) -> None:
    problem = find_compile_problem(backend, "cpu", {}, PYTHON)
    assert said in problem
    assert bool(problem) is bool(said)


@pytest.mark.launch
def test_unusable_backend_is_refused_by_plan_and_run(entrypoint: Entrypoint) -> None:
    env = {"TRAIN_COMPILE": "default", "TRAIN_COMPILE_BACKEND": "nosuch"}
    for command in ("plan", "train"):
        result = entrypoint(command, env=env)
        assert (result.code, len(result.error_lines)) == (3, 1), result.err
        assert result.error_lines[0].startswith(
            "entrypoint: error: TRAIN_COMPILE_BACKEND=nosuch: nosuch cannot be used"
        )


@pytest.mark.slow
@pytest.mark.launch
def test_temporary_folder_without_exec_is_named(entrypoint: Entrypoint, tmp_path: Path) -> None:
    if subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs the right to make a mount namespace (root)")
    folder = tmp_path / "noexec"
    folder.mkdir()
    mount = f'mount -t tmpfs -o noexec tmpfs {folder} && exec "$@"'
    command = ("unshare", "-m", "sh", "-c", mount, "sh", PYTHON, "-m", "entrypoint")
    problem = "torchinductor is mounted noexec. Set TORCHINDUCTOR_CACHE_DIR"
    doctor = " ".join(entrypoint("doctor", command=command, env={"XDG_CACHE_HOME": str(folder)}).out.split())
    assert problem in doctor
    assert "is mounted noexec. Set TORCHINDUCTOR_CACHE_DIR" in entrypoint.error_line(
        "plan", command=command, env={"XDG_CACHE_HOME": str(folder), "TRAIN_COMPILE": "default"}, code=3
    )
    elsewhere = {"XDG_CACHE_HOME": str(folder), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache/of/inductor")}
    assert "is mounted noexec" not in entrypoint("doctor", command=command, env=elsewhere).out


SITE = "lib/python3.11/site-packages/oneccl_bindings_for_pytorch"


@pytest.mark.parametrize("providers", ["opt/mpi/libfabric/lib/prov", "lib/prov", ""])
def test_find_oneccl_finds_providers_where_they_are(tmp_path: Path, providers: str) -> None:
    folder = tmp_path / SITE
    (folder / providers).mkdir(parents=True)
    assert find_oneccl(tmp_path) == OneCcl(str(folder), str(folder / providers) if providers else "")


def test_find_oneccl_takes_libraries_of_their_own_packages(tmp_path: Path) -> None:
    (tmp_path / SITE).mkdir(parents=True)
    (tmp_path / "lib/libfabric/prov").mkdir(parents=True)
    (tmp_path / "lib/libmpi.so.12").touch()
    assert find_oneccl(tmp_path) == OneCcl(str(tmp_path), str(tmp_path / "lib/libfabric/prov"))


def test_find_oneccl_without_the_package_is_empty(tmp_path: Path) -> None:
    assert find_oneccl(tmp_path) == OneCcl()


INSTALLED = OneCcl("/p", "/p/prov")


@pytest.mark.parametrize(
    ("oneccl", "environ", "by_hydra", "variables"),
    [
        (INSTALLED, {}, False, {"I_MPI_ROOT": "/p", "FI_PROVIDER_PATH": "/p/prov", "CCL_ATL_TRANSPORT": "ofi"}),
        (INSTALLED, {}, True, {"I_MPI_ROOT": "/p", "FI_PROVIDER_PATH": "/p/prov"}),
        (INSTALLED, {"I_MPI_ROOT": "/mine", "CCL_ATL_TRANSPORT": "mpi"}, False, {"FI_PROVIDER_PATH": "/p/prov"}),
        (OneCcl("/p", ""), {}, True, {"I_MPI_ROOT": "/p"}),
        (OneCcl(), {}, False, {"CCL_ATL_TRANSPORT": "ofi"}),
    ],
)
def test_transport_variables_are_set_where_missing(
    oneccl: OneCcl, environ: dict[str, str], by_hydra: bool, variables: dict[str, str]
) -> None:
    found = transport_variables(oneccl, environ, by_hydra=by_hydra)
    assert {name: value for name, (value, _) in found.items()} == variables
