"""Which GPUs CUDA_VISIBLE_DEVICES leaves visible."""

from __future__ import annotations

from pathlib import Path

import pytest

from entrypoint.gpus import Gpu, read_gpus, select

FOUND = tuple(Gpu(index, f"GPU-{index}abc", "H200", 1 << 37) for index in range(4))


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        (None, ["GPU-0abc", "GPU-1abc", "GPU-2abc", "GPU-3abc"]),
        ("", []),
        ("-1", []),
        ("2,0", ["GPU-2abc", "GPU-0abc"]),
        ("GPU-3abc", ["GPU-3abc"]),
        ("GPU-1", ["GPU-1abc"]),
        ("1,9,2", ["GPU-1abc"]),
    ],
)
def test_visible_devices_follow_cudas_own_rule(visible: str | None, uuids: list[str]) -> None:
    chosen = select(FOUND, visible)
    assert [gpu.uuid for gpu in chosen] == uuids
    assert [gpu.index for gpu in chosen] == list(range(len(uuids)))


def test_no_driver_is_no_error(tmp_path: Path) -> None:
    assert read_gpus(tmp_path) == ()


@pytest.mark.cuda
def test_nvml_tells_what_torch_sees() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    assert [gpu.name for gpu in read_gpus(Path("/"))] == [
        torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
    ]
