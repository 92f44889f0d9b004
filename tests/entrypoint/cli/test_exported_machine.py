"""A node in a file: what is written is read again, and a file that describes none is refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from entrypoint.cli.plan_inputs import export_machine, read_machine
from tests.conftest import refusal
from tests.factories import make_machine

NODE = make_machine(cores=8, gpus=2)


def test_exported_node_is_read_again_without_its_load(tmp_path: Path) -> None:
    file = tmp_path / "node.json"
    file.write_text(export_machine(replace(NODE, busy_cpus=3.0)))
    assert read_machine(file) == replace(NODE, busy_cpus=0.0)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "truncated"),
        ("[]", "Expected `object`"),
        ("{}", "missing required field"),
        (export_machine(replace(NODE, cpus=())), "has CPUs"),
        (export_machine(replace(NODE, cpus=NODE.cpus[:1] * 2)), "different ids"),
        (export_machine(replace(NODE, memory_bytes=-1)), "and memory"),
        (export_machine(replace(NODE, hostname="\x1b[2J")), "control characters"),
    ],
)
def test_file_that_describes_no_node_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "node.json"
    file.write_text(text)
    assert "entrypoint doctor --export-machine" in refusal(
        read_machine, file, match=f"^--machine=.*does not describe a node.*{problem}"
    )
