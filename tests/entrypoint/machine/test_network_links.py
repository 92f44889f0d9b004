"""Interfaces and RDMA adapters as the kernel describes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from entrypoint.doctor.network_speed import Link, RdmaAdapter, read_adapters, read_link, uverbs_problem
from tests.machines import write_adapter


@pytest.mark.parametrize(("speed", "expected"), [("25000\n", 25000), ("-1\n", None), (None, None)])
def test_speed_of_a_virtual_interface_is_unknown(tmp_path: Path, speed: str | None, expected: int | None) -> None:
    folder = tmp_path / "sys/class/net/eth0"
    folder.mkdir(parents=True)
    (folder / "mtu").write_text("9000\n")
    if speed:
        (folder / "speed").write_text(speed)
    assert read_link(tmp_path, "eth0") == Link(expected, 9000)


def test_adapters_have_kind_state_and_rate(tmp_path: Path) -> None:
    assert read_adapters(tmp_path) == ()
    write_adapter(tmp_path, "mlx5_0", "InfiniBand")
    write_adapter(tmp_path, "mlx5_1", "Ethernet", state="1: DOWN")
    write_adapter(tmp_path, "rdmap0", "Unspecified", driver="efa")
    assert read_adapters(tmp_path) == (
        RdmaAdapter("mlx5_0", "InfiniBand", True, "400 Gb/sec"),
        RdmaAdapter("mlx5_1", "RoCE", False, "400 Gb/sec"),
        RdmaAdapter("rdmap0", "EFA", True, "400 Gb/sec"),
    )


def test_uverbs_of_a_container_may_be_missing(tmp_path: Path) -> None:
    assert uverbs_problem(tmp_path).startswith("no /dev/infiniband/uverbs* here")
    write_adapter(tmp_path, "mlx5_0", "InfiniBand")
    assert uverbs_problem(tmp_path) == ""
