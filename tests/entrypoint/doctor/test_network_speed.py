"""How data travels between nodes, and how fast: `entrypoint doctor --network`."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest

from entrypoint.doctor.network_speed import Link, RdmaAdapter, network_checks, read_adapters, read_link, uverbs_problem
from tests.conftest import Entrypoint
from tests.entrypoint.launch.running_ranks import run_together
from tests.machines import write_adapter
from tests.net import free_port

UNLIMITED, LOW = resource.RLIM_INFINITY, 8 << 20


@pytest.fixture(autouse=True)
def unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process lock any memory."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (UNLIMITED, UNLIMITED))


def nccl_check(root: Path, environ: dict[str, str], libraries: str) -> tuple[str, str]:
    environ = {"GLOO_SOCKET_IFNAME": "lo", **environ}
    found = {
        check.what: check for check in network_checks(root, environ, lambda name: name if name in libraries else None)
    }
    assert found["Gloo"].seen == "TCP over lo; it has no RDMA"
    return found["NCCL"].state, found["NCCL"].seen


@pytest.mark.parametrize(
    ("layer", "driver", "environ", "libraries", "limit", "state", "said"),
    [
        ("InfiniBand", "mlx5_core", {}, "ibverbs", UNLIMITED, "ok", "RDMA by a0"),
        ("Ethernet", "mlx5_core", {}, "ibverbs", UNLIMITED, "ok", "RDMA by a0"),
        ("Unspecified", "efa", {}, "nccl-net", UNLIMITED, "ok", "RDMA by a0"),
        ("Unspecified", "efa", {}, "ibverbs", UNLIMITED, "warning", "TCP over lo: libnccl-net.so is not found"),
        ("InfiniBand", "mlx5_core", {}, "", UNLIMITED, "warning", "TCP over lo: libibverbs.so is not found"),
        ("InfiniBand", "mlx5_core", {}, "ibverbs", LOW, "warning", "TCP over lo: only 8 MiB may be locked"),
        ("InfiniBand", "mlx5_core", {"NCCL_IB_DISABLE": "1"}, "ibverbs", UNLIMITED, "warning", "TCP over lo: NCCL_IB"),
        ("InfiniBand", "mlx5_core", {"NCCL_NET": "Socket"}, "ibverbs", UNLIMITED, "warning", "TCP over lo: NCCL_NET="),
    ],
)  # fmt: skip
def test_nccl_uses_rdma_or_says_why_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, layer: str, driver: str, environ: dict[str, str], libraries: str,
    limit: int, state: str, said: str,
) -> None:  # fmt: skip
    write_adapter(tmp_path, "a0", layer, driver=driver)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    found = nccl_check(tmp_path, environ, libraries)
    assert found[0] == state
    assert found[1].startswith(said)


def test_nccl_without_usable_adapter_says_so(tmp_path: Path) -> None:
    assert nccl_check(tmp_path, {}, "ibverbs") == ("ok", "TCP over lo: no RDMA adapter in /sys/class/infiniband")
    write_adapter(tmp_path, "a0", "InfiniBand", state="1: DOWN")
    assert "no adapter has an active port" in nccl_check(tmp_path, {}, "ibverbs")[1]
    write_adapter(tmp_path, "a1", "InfiniBand")
    for file in (tmp_path / "dev/infiniband").iterdir():
        file.unlink()
    assert "no /dev/infiniband/uverbs* here" in nccl_check(tmp_path, {}, "ibverbs")[1]


def all_reduce(checks: list[dict[str, Any]]) -> str:
    (found,) = (check["seen"] for check in checks if check["what"] == "all-reduce")
    return str(found)


@pytest.mark.launch
@pytest.mark.versions
@pytest.mark.parametrize("ranks", [1, 2])
def test_one_node_says_what_it_has(entrypoint: Entrypoint, ranks: int) -> None:
    result = entrypoint.succeed("doctor", "--network", "--json", f"--nproc-per-node={ranks}")
    checks = json.loads(result.out)
    assert {"interface", "Gloo", "NCCL"} <= {check["what"].split()[-1] for check in checks}
    assert all_reduce(checks) == "not measured: on one node nothing leaves it"


@pytest.mark.launch
def test_two_nodes_measure_the_way_between_them(entrypoint: Entrypoint) -> None:
    words = ("doctor", "--network", "--nnodes=2", "--nproc-per-node=1", "--cpu-binding=none")
    env = {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    first, second = run_together(entrypoint, [{**env, "LAUNCH_NODE_RANK": node} for node in "01"], *words)
    assert (first.code, second.code) == (0, 0), first.err
    assert "2 nodes by gloo, " in first.out
    assert first.out.count("Gloo  ") == 2, "each node shows what it has"
    assert second.out == "", "rank 0 prints"


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
