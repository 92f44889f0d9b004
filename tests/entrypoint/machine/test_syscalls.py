"""Memory bound to NUMA nodes, on this machine's own kernel."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from entrypoint.machine.cpu_topology import read_cpu_list
from entrypoint.machine.procfs import get_memory_nodes
from tests.conftest import PYTHON
from tests.machines import write

NODES = read_cpu_list(Path("/sys/devices/system/node/has_memory"))
BIND = """
import subprocess, sys
from entrypoint.machine.procfs import bind_memory, get_memory_nodes
try:
    bind_memory((int(sys.argv[1]),))
except OSError as error:
    sys.exit(f"refused: {error}")
again = "from entrypoint.machine.procfs import get_memory_nodes as m; print(m())"
print(get_memory_nodes(), subprocess.run([sys.executable, "-c", again], capture_output=True, text=True).stdout)
"""


@pytest.mark.launch
def test_set_mempolicy_is_inherited_by_exec() -> None:
    if not NODES:
        pytest.skip("needs a kernel that shows NUMA nodes")
    done = subprocess.run([PYTHON, "-c", BIND, str(NODES[-1])], capture_output=True, text=True, check=False)
    if "Operation not permitted" in done.stderr:
        pytest.skip("needs set_mempolicy, which this container's seccomp filter forbids")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == f"({NODES[-1]},) ({NODES[-1]},)"


def test_set_mempolicy_unknown_node_raises_os_error() -> None:
    done = subprocess.run([PYTHON, "-c", BIND, "1000"], capture_output=True, text=True, check=False)
    assert "refused: [Errno " in done.stderr


@pytest.mark.parametrize(
    ("line", "nodes"),
    [
        ("7f00 default anon=3", ()),
        ("7f00 bind:0-1 anon=3", (0, 1)),
        ("7f00 prefer:1 file=/x", (1,)),
        ("7f00 prefer=3 heap", (3,)),
        ("", ()),
    ],
)
def test_get_memory_nodes_reads_numa_maps(tmp_path: Path, line: str, nodes: tuple[int, ...]) -> None:
    write(tmp_path, {"proc/7/numa_maps": line})
    assert get_memory_nodes("7", tmp_path) == nodes
