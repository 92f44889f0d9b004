"""Which backends of torch.compile can be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from entrypoint.compilers import PACKAGES, compiler_problem

ALL = {
    "torch": "2.8.0", "intel_extension_for_pytorch": "2.8.0", "onnxruntime": "1.31.1", "onnxscript": "0.3.2",
    "triton": "3.4.0",
}  # fmt: skip


@pytest.mark.parametrize(
    ("backend", "device", "versions", "problem"),
    [
        ("eager", "cpu", {}, ""),
        ("aot_eager", "cuda", {}, ""),
        ("inductor", "cpu", {}, ""),
        ("inductor", "cuda", ALL, ""),
        ("inductor", "cuda", {}, "needs triton, which is not installed"),
        ("cudagraphs", "cpu", {}, "is for GPUs"),
        ("cudagraphs", "cuda", {}, ""),
        ("ipex", "cpu", ALL, ""),
        ("ipex", "cuda", ALL, "is for CPUs"),
        ("ipex", "cpu", {}, "is not installed"),
        ("ipex", "cpu", ALL | {"torch": "2.9.1"}, "2.8.0 does not go with torch 2.9.1"),
        ("onnxrt", "cpu", ALL, ""),
        (
            "onnxrt",
            "cpu",
            ALL | {"onnxscript": "0.7.2"},
            "needs onnxscript before 0.4, since it calls what is gone from 0.7.2",
        ),
        ("onnxrt", "cpu", {"onnxscript": "1"}, "needs onnxruntime, which is not installed"),
        ("onnxrt", "cpu", {}, "needs onnxruntime and onnxscript, which is not installed"),
        ("openxla", "cpu", {}, "needs torch_xla, which is not installed"),
    ],
)
def test_a_backend_needs_its_packages_and_its_device(
    backend: str, device: str, versions: dict[str, str], problem: str
) -> None:
    assert backend in PACKAGES
    assert compiler_problem(backend, device, versions) == problem


def test_inductor_needs_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert compiler_problem("inductor", "cpu", {}) == "needs a C++ compiler: install g++ and Python's headers"
