"""The container and the kernel's limits around the process."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from entrypoint.machine.container import ContainerInfo, detect_container, memlock_bytes, volatile_place
from tests.machines import write

SIF = {".singularity.d/actions/run": ""}


@pytest.mark.parametrize(
    ("marker", "engine"),
    [("x", ""), (".dockerenv", "Docker"), ("run/.containerenv", "Podman"), (".singularity.d/actions/run", "Apptainer")],
)
def test_container_engine_is_found_by_its_marker(tmp_path: Path, marker: str, engine: str) -> None:
    write(tmp_path, {marker: ""})
    assert detect_container(tmp_path).engine == engine


@pytest.mark.parametrize(("limit", "found"), [(8388608, 8388608), (resource.RLIM_INFINITY, None)])
def test_container_memlock_limit_is_read(
    tmp_path: Path, limit: int, found: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    write(tmp_path, {"sys/class/infiniband/mlx5_0/x": ""})
    assert detect_container(tmp_path).memlock_bytes == found
    assert detect_container(tmp_path).rdma == ("mlx5_0",)


OVERLAY = "overlay / overlay rw,lowerdir=/a 0 0\n"
BOUND = OVERLAY + "/dev/sda /workspace/runs ext4 rw 0 0\ntmpfs /tmp tmpfs rw 0 0\n/dev/sda /with\\040space xfs rw 0 0"
DOCKER = {".dockerenv": ""}


@pytest.mark.parametrize(
    ("files", "folder", "place"),
    [
        (DOCKER | {"proc/self/mounts": OVERLAY}, "/workspace/runs", "the container's own layer"),
        ({"proc/self/mounts": OVERLAY}, "/workspace/runs", "the container's own layer"),  # a pod has no marker
        (DOCKER | {"proc/self/mounts": BOUND}, "/workspace/runs/new", ""),
        (DOCKER | {"proc/self/mounts": BOUND}, "/with space/runs", ""),
        (DOCKER | {"proc/self/mounts": BOUND}, "/workspace/other", "the container's own layer"),
        (DOCKER | {"proc/self/mounts": BOUND}, "/tmp/runs", "a tmpfs of the container"),
        (
            SIF | {"proc/self/mounts": OVERLAY + "tmpfs /nobody tmpfs rw 0 0"},
            "/nobody/runs",
            "a tmpfs of the container",
        ),
        (SIF | {"proc/self/mounts": OVERLAY + "/dev/sda /nobody ext4 rw 0 0"}, "/nobody/runs", ""),
        ({"proc/self/mounts": "/dev/vda / ext4 rw 0 0\ntmpfs /tmp tmpfs rw 0 0"}, "/tmp/runs", ""),
        (DOCKER | {"proc/self/mounts": "/dev/vda / ext4 rw 0 0"}, "/workspace/runs", ""),
        ({}, "/workspace/runs", ""),
    ],
)
def test_volatile_place_of_an_output_folder(tmp_path: Path, files: dict[str, str], folder: str, place: str) -> None:
    write(tmp_path, files)
    assert volatile_place(tmp_path, Path(folder)) == place


def test_empty_root_raises_no_error(tmp_path: Path) -> None:
    assert detect_container(tmp_path) == ContainerInfo(memlock_bytes=memlock_bytes())
