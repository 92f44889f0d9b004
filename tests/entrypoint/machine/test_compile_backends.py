"""Whether a backend of torch.compile can be used."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from entrypoint.machine.backends import find_compile_problem, find_ipex_problem
from tests.conftest import PYTHON, Entrypoint

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
