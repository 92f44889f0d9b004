"""What ends a command besides its own refusals."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import clean_environment


@pytest.mark.launch
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be a user without other processes")
@pytest.mark.parametrize(("uid", "launcher"), [(60_001, "local"), (60_002, "torchrun")])
def test_limit_of_processes_is_one_line(tmp_path: Path, uid: int, launcher: str) -> None:
    script = tmp_path / "x.py"
    script.write_text("")
    tmp_path.chmod(0o777)
    as_nobody = ["setpriv", f"--reuid={uid}", "--clear-groups", "--inh-caps=+dac_override"]
    command = [sys.executable, "-m", "entrypoint", "run", "--nproc-per-node=2", f"--launcher={launcher}", str(script)]
    done = subprocess.run(
        [*as_nobody, "--ambient-caps=+dac_override", "prlimit", "--nproc=1", *command],
        env={**clean_environment(), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    errors = [line for line in done.stderr.splitlines() if "rror" in line or "Traceback" in line]
    assert done.returncode == 3, done.stderr
    assert len(errors) == 1, done.stderr
